"""What a comparison tells its workers, and how they answer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

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
