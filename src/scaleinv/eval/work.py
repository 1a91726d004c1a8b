"""What workers are told to do, and how they answer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from scaleinv.eval.needle_task import NeedleTask
from scaleinv.eval.needle_train import NeedleTraining
from scaleinv.train.config import TrainConfig

Send = Callable[[dict[str, Any]], None]
"""Takes the records of a worker: see `scaleinv.eval.worker`."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What a worker does: it trains unless ``train`` is None, then evaluates unless there are no methods."""

    run: str
    train: TrainConfig | None
    resume: bool
    methods: tuple[str, ...]
    lengths: str
    tokens: int
    device: str
    out: str
    """Where the evaluations go."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Work:
        values = json.loads(text)
        train = None if values["train"] is None else TrainConfig.from_json(values["train"])
        return Work(**{**values, "train": train, "methods": tuple(values["methods"])})


@dataclasses.dataclass(frozen=True)
class NeedleWork:
    """Fine-tune a run on needles and ask it: the arguments of `scaleinv.eval.needle.run_needle`."""

    run: str
    lengths: str
    out: str
    methods: tuple[str, ...]
    task: NeedleTask
    training: NeedleTraining
    samples: int
    seed: int | None
    device: str
    tolerance: float | None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> NeedleWork:
        values = json.loads(text)
        task = NeedleTask(**values["task"])
        training = NeedleTraining(**values["training"])
        return NeedleWork(**{**values, "methods": tuple(values["methods"]), "task": task, "training": training})


def read_work(text: str) -> Work | NeedleWork:
    """What a worker is told, as JSON."""
    return NeedleWork.from_json(text) if "task" in json.loads(text) else Work.from_json(text)
