"""One sequence over several ranks: attention exactly as one process computes it.

- `layout`: which positions each rank holds
- `plan`: which blocks of keys a rank's queries see, and so what is sent
- `agreement`: do all ranks ask for the same
- `exchange`: messages in flight while the caller computes
- `ring`: the blocks, merged; their gradients, returned
- `attention`, `shard`, `gather`: the calls
- `context`: what a model needs of them
"""

from scaleinv.distributed.attention import attention
from scaleinv.distributed.collect import gather, shard
from scaleinv.distributed.context import Context
from scaleinv.distributed.exchange import RankLost, Traffic, counted
from scaleinv.distributed.layout import Split

__all__ = ["Context", "RankLost", "Split", "Traffic", "attention", "counted", "gather", "shard"]
