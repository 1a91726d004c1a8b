"""Training: `run(TrainConfig(...))`, with Muon, checkpoints and any number of ranks."""

from typing import TYPE_CHECKING

from scaleinv import lazy
from scaleinv.train.config import TrainConfig, preset

if TYPE_CHECKING:
    from scaleinv.train.loop import Diverged, Result, run

__getattr__, __dir__ = lazy.attach(__name__, dict.fromkeys(("Diverged", "Result", "run"), "loop"))

__all__ = ["Diverged", "Result", "TrainConfig", "preset", "run"]
