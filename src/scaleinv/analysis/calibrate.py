"""Factors that bring the scores of every head to a standard deviation of 1, for models without QK-norm.

The scale-invariant logits a_t S + m_t are made for scores S of variance 1. A model without QK-norm has other variances,
so a conversion can divide the scores of each head by their standard deviation:

    calibration = scaleinv.analysis.calibrate(model, tokens)
    scaleinv.hf.convert(model, calibration=calibration)
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scaleinv.analysis.scores import ScoreStatistics, score_statistics
from scaleinv.files import UnreadableFile, read_object, write_json
from scaleinv.version import VERSION

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration(Mapping[int, Tensor]):
    """A factor of the scores per layer and head; also a mapping from the layer to its factors ``[heads]``."""

    model: str
    """The model's name."""
    layers: tuple[int, ...]
    """The layers that have attention, as the model numbers them."""
    scale: Tensor
    """The factors, float64 ``[layers, heads]``."""

    def __post_init__(self) -> None:
        if self.scale.dim() != 2 or self.scale.shape[0] != len(self.layers):
            raise ValueError(f"scale must have shape [{len(self.layers)}, heads], got {list(self.scale.shape)}")
        if not bool((self.scale.isfinite() & (self.scale > 0)).all()):
            raise ValueError("scale must be positive and finite")

    @classmethod
    def of(cls, scores: ScoreStatistics) -> Calibration:
        """The calibration from existing statistics. A head whose scores are all equal keeps 1, with a warning."""
        deviation = scores.rotary.variance.sqrt()
        flat = ~(deviation > 1e-8)
        if bool(flat.any()):
            logger.warning(
                "%s: the scores do not vary in %d heads, which keep a factor of 1", scores.model, int(flat.sum())
            )
        return cls(scores.model, scores.layers, torch.where(flat, 1.0, 1 / deviation))

    def save(self, path: str | Path) -> Path:
        """Write it as JSON."""
        values = {
            "kind": "scaleinv calibration",
            "version": VERSION,
            "model": self.model,
            "layers": list(self.layers),
            "scale": self.scale.tolist(),
        }
        write_json(path, values)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read what `save` wrote."""
        advice = "`scaleinv analyze model` writes it again"
        values = read_object(path, advice)
        try:
            scale = torch.tensor(values["scale"], dtype=torch.float64)
            return cls(values["model"], tuple(map(int, values["layers"])), scale)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise UnreadableFile(path, f"holds no calibration: {error!r}", advice) from error

    def __getitem__(self, layer: int) -> Tensor:
        if layer not in self.layers:
            raise KeyError(layer)
        return self.scale[self.layers.index(layer)]

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


def calibrate(
    model: nn.Module, tokens: Tensor | Sequence[int], length: int | None = None, **options: Any
) -> Calibration:
    """The factor per head that would make the standard deviation of its scores 1, measured on a text.

    Scores are those before the logit transform, with the rotary that the model has now; a factor that a conversion
    already applies does not count. ``length`` and ``options`` are those of `score_statistics`.
    """
    return Calibration.of(score_statistics(model, tokens, length, **options))
