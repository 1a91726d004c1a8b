"""`scaleinv adapt --fsdp` on CPUs: accelerate shards over accelerators only, so it is told that CPU ranks are some.

Everything else is real: FSDP2 over Gloo, `Trainer`, checkpoints, the gathered folder. With DIE_AT=5 in the environment
rank 0 dies when the checkpoint of step 5 is written.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from accelerate import DistributedType, PartialState
from torch.distributed.fsdp import FSDPModule

from scaleinv.cli import main
from scaleinv.hf.adapt.training import Watcher

_init = PartialState.__init__


def _as_accelerators(self: PartialState, *arguments: Any, **options: Any) -> None:
    _init(self, *arguments, **options)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


def _check_and_die(self: Watcher, args: Any, state: Any, control: Any, **_: Any) -> None:
    assert isinstance(self.model, FSDPModule), "the model is not sharded"
    if state.global_step == int(os.environ.get("DIE_AT", "0")) and state.is_world_process_zero:
        os._exit(9)


if __name__ == "__main__":
    PartialState.__init__ = _as_accelerators  # type: ignore[method-assign]
    Watcher.on_save = _check_and_die  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
