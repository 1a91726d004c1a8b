"""`scaleinv adapt`, killed where a test wants it; and with --fsdp also on CPUs.

With DIE_AT=5 in the environment rank 0 dies when the checkpoint of step 5 is written. accelerate shards over
accelerators only, so for --fsdp it is told that CPU ranks are some. Everything else is real: FSDP2 over Gloo,
`Trainer`, checkpoints, the gathered folder.
"""

from __future__ import annotations

import os
import signal
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
    assert isinstance(self.model, FSDPModule) == ("--fsdp" in sys.argv), "sharded if asked for"
    _die(state)


def _die(state: Any) -> None:
    if str(state.global_step) == os.environ.get("DIE_AT") and state.is_world_process_zero:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if "--fsdp" in sys.argv:
        PartialState.__init__ = _as_accelerators  # type: ignore[method-assign]
    Watcher.on_save = _check_and_die  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
