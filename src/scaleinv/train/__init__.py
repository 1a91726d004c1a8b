"""Training: `run(TrainConfig(...))`, with Muon, checkpoints and any number of ranks."""

from scaleinv.train.config import TrainConfig, preset
from scaleinv.train.loop import Diverged, Result, run

__all__ = ["Diverged", "Result", "TrainConfig", "preset", "run"]
