"""What a conversion is: a few numbers that fit into config.json, and the logit transforms that they stand for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from scaleinv import schedule
from scaleinv.logits import FittedScaleInvariant, LogitTransform, Plain, ScaleInvariant

Logits: TypeAlias = Literal["scale-invariant", "logn", "plain"]
Stretch: TypeAlias = Literal["yarn"]
HeadFactors: TypeAlias = Tensor | Sequence[Sequence[float]] | Mapping[int, Any]
"""A factor per layer and query head; `scaleinv.analysis.Calibration` is one such mapping."""

Fit: TypeAlias = Sequence[Tensor | Sequence[Sequence[float]]]
"""Means and variances of the scores, each ``[layers, query heads]``: `scaleinv.hf.measure_scores` gives them."""

_TABLES = ("calibration", "score_mean", "score_variance")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a model was converted; see `scaleinv.hf.convert` for the meaning of the fields."""

    logits: Logits = "scale-invariant"
    tau: float = schedule.TAU
    p: float | None = 0.5
    train_length: int | None = None
    """With logits="logn": where L = S. With a stretch: the tokens beyond which it acts."""
    calibration: tuple[tuple[float, ...], ...] | None = None
    """Factors of the scores, one row for each layer and one number for each query head."""
    score_mean: tuple[tuple[float, ...], ...] | None = None
    """Mean of the scores, one row for each layer and one number for each query head."""
    score_variance: tuple[tuple[float, ...], ...] | None = None
    """Their variance; with both, the scale-invariant logits are fitted to them."""
    stock_attention: str = "sdpa"
    """What `scaleinv.hf.revert` goes back to."""
    stretch: Stretch | None = None

    def __post_init__(self) -> None:
        if self.logits not in get_args(Logits):
            raise ValueError(f"logits must be one of {', '.join(get_args(Logits))}, got {self.logits!r}")
        schedule.check_parameters(self.tau, schedule.HEIGHT, schedule.HEIGHT)
        if self.p is not None and not 0 <= self.p <= 1:
            raise ValueError(f"p must lie between 0 and 1, or be None, got {self.p!r}")
        if self.logits == "logn" and (self.train_length is None or self.train_length < 2):
            raise ValueError(f"train_length must be at least 2 with logits='logn', got {self.train_length!r}")
        if self.stretch is not None:
            if self.stretch not in get_args(Stretch):
                raise ValueError(
                    f"stretch must be one of {', '.join(get_args(Stretch))}, or None, got {self.stretch!r}"
                )
            if self.p is not None:
                raise ValueError(f"stretch keeps the model's own rotary: p must be None, got {self.p!r}")
            if self.train_length is None or self.train_length < 2:
                raise ValueError(f"train_length must be at least 2 with a stretch, got {self.train_length!r}")
        for row in self.calibration or ():
            if not all(math.isfinite(factor) for factor in row):
                raise ValueError(f"calibration must be finite, got {row}")

        if (self.score_mean is None) != (self.score_variance is None):
            raise ValueError("score_mean and score_variance go together: give both or none")
        if self.score_mean is not None and self.score_variance is not None:
            if self.logits != "scale-invariant" or self.calibration is not None:
                raise ValueError("fit goes with logits='scale-invariant' and without calibration")
            schedule.check_moments(self.score_mean, self.score_variance)

    @property
    def fit(self) -> tuple[tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]] | None:
        """Mean and variance of the scores that the logits are fitted to, as `scaleinv.hf.convert` takes them."""
        if self.score_mean is None or self.score_variance is None:
            return None
        return self.score_mean, self.score_variance

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Settings:
        """The inverse of `to_dict`; an unknown key raises ValueError: a newer scaleinv wrote it."""
        unknown = set(values) - {field.name for field in dataclasses.fields(Settings)}
        if unknown:
            raise ValueError(f"this scaleinv does not know the conversion settings {sorted(unknown)}: update it")
        rows = {name: tuple(tuple(row) for row in values[name]) for name in _TABLES if values.get(name) is not None}
        return Settings(**{**values, **rows})

    def to_dict(self) -> dict[str, Any]:
        """For config.json."""
        values = dataclasses.asdict(self)
        for name in _TABLES:
            if values[name] is not None:
                values[name] = [list(row) for row in values[name]]
        for name in ("stretch", "score_mean", "score_variance"):  # earlier versions read what does without them
            if values[name] is None:
                del values[name]
        return values

    def transforms(self) -> tuple[LogitTransform, ...]:
        """One transform per layer, or a single one that all layers share."""
        slope = None
        if self.logits == "logn":
            assert self.train_length is not None
            slope = 1 / math.log(self.train_length)
        if self.fit is not None:
            rows = zip(*self.fit, strict=True)
            return tuple(FittedScaleInvariant(mean, variance, self.tau) for mean, variance in rows)
        tables = ScaleInvariant(self.tau) if self.logits == "scale-invariant" else Plain()
        if self.calibration is None:
            return (tables if slope is None else Scaled(tables, None, slope),)
        return tuple(Scaled(tables, row, slope) for row in self.calibration)


class Scaled(LogitTransform):
    """Another transform with the scores multiplied: by a factor for each head, by slope · log(visible keys), or both.

    The factors are plain numbers, not buffers: a cast of the model must not round them.
    """

    def __init__(self, tables: LogitTransform, factors: Sequence[float] | None, slope: float | None) -> None:
        super().__init__()
        self.inner = tables
        self.heads = tables.heads if factors is None else len(factors)
        self.factors = [1.0] if factors is None else list(factors)
        self.slope = slope
        self.counts = "context" if slope is None else "visible"

    def tables(self, length: int, *, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        return self.inner.tables(length, dtype=dtype, device=device)

    def table_range(self, start: int, stop: int, *, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        return self.inner.table_range(start, stop, dtype=dtype, device=device)

    def query_gain(self, count: Tensor) -> Tensor:
        factors = torch.tensor(self.factors, dtype=torch.float32, device=count.device)[None, :, None]  # [1, H, 1]
        if self.slope is None:
            return factors.expand(-1, -1, count.shape[-1])
        return factors * (self.slope * count.clamp_min(1).to(torch.float32).log()[:, None, :])


def fit_rows(fit: Fit, layers: int, heads: int) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Check means and variances and bring both to ``layers`` rows of ``heads`` numbers."""
    if len(fit) != 2:
        raise ValueError(f"fit must hold the means and the variances of the scores, got {len(fit)} parts")
    tables = [torch.as_tensor(part, dtype=torch.float64) for part in fit]
    for name, table in zip(("means", "variances"), tables, strict=True):
        if table.shape != (layers, heads):
            raise ValueError(
                f"the {name} of fit must have shape [layers, heads] = [{layers}, {heads}], got {list(table.shape)}"
            )
    return tuple(tuple(tuple(row) for row in table.tolist()) for table in tables)


def calibration_rows(calibration: HeadFactors, layers: int, heads: int) -> tuple[tuple[float, ...], ...]:
    """Check a user's calibration and bring it to ``layers`` rows of ``heads`` numbers.

    Takes a tensor or nested sequence ``[layers, heads]``, or a mapping from layer to ``[heads]``; layers that a mapping
    leaves out keep 1.
    """
    if isinstance(calibration, Mapping):
        strange = sorted(set(calibration) - set(range(layers)))
        if strange:
            raise ValueError(f"calibration has layers {strange}, but the model has layers 0 … {layers - 1}")
        table = torch.ones(layers, heads, dtype=torch.float64)
        for layer, factors in calibration.items():
            row = torch.as_tensor(factors, dtype=torch.float64)
            if row.shape != (heads,):
                raise ValueError(f"calibration[{layer}] must have shape [{heads}], got {list(row.shape)}")
            table[layer] = row
    else:
        table = torch.as_tensor(calibration, dtype=torch.float64)
        if table.shape != (layers, heads):
            raise ValueError(
                f"calibration must have shape [layers, heads] = [{layers}, {heads}], got {list(table.shape)}"
            )
    return tuple(tuple(row) for row in table.tolist())
