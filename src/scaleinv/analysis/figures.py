"""The numbers behind the paper's figures 1 (top), 2 and 6: independent Gaussian scores.

`scaleinv.plots.theory` draws them. Each saves itself as CSV, one row per point, and as JSON with everything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch

from scaleinv.analysis.gaussian import sample_ranges
from scaleinv.analysis.growth import Fit, fit
from scaleinv.analysis.ranges import estimate
from scaleinv.analysis.theory import expected_range_entropy
from scaleinv.analysis.verify import power_starts
from scaleinv.files import write_data
from scaleinv.logits import LogitTransform, LogN, Plain, ScaleInvariant

Progress = Callable[[str], None]

DELTAS = (2, 5, 10)

LENGTHS = tuple(2**k for k in range(7, 21))
"""Context lengths of figure 1: 128 … 1,048,576 tokens."""


def compared() -> dict[str, LogitTransform]:
    """The three transforms of figure 1, with the paper's settings."""
    return {"plain": Plain(), "logn": LogN(heads=1, scale=0.4), "scale-invariant": ScaleInvariant()}


@dataclasses.dataclass(frozen=True)
class ContextPoint:
    """One method at one context length; every mean with its standard error over samples. Entropies are in nats."""

    method: str
    length: int
    samples: int
    entropy: float
    entropy_error: float
    range_entropy: float
    range_entropy_error: float
    recent_share: float
    recent_share_error: float


@dataclasses.dataclass(frozen=True)
class ContextFigure:
    """Figure 1, top: against the context length N, the entropy of the whole distribution, the entropy inside the
    farthest range [N/ratio, N), and the share of attention on the most recent tokens.

    For plain and LogN logits the expectation of that share is exactly recent/N. At large N, LogN's comes from rare
    samples, so that its sample mean and error are both usually too small there.
    """

    name: ClassVar[str] = "figure1-gaussian"
    points: tuple[ContextPoint, ...]
    ratio: int
    recent: int
    seed: int

    def save(self, folder: Path) -> list[Path]:
        """Write ``figure1-gaussian.csv`` and ``.json``; returns their paths."""
        return write_data(folder, self.name, [dataclasses.asdict(point) for point in self.points], self)


def context_figure(
    lengths: Sequence[int] = LENGTHS,
    samples: int = 1000,
    seed: int = 0,
    transforms: Mapping[str, LogitTransform] | None = None,
    ratio: int = 10,
    recent: int = 100,
    progress: Progress | None = None,
) -> ContextFigure:
    """Figure 1, top, for `compared` or other transforms by name; ``lengths`` must exceed ``recent``."""
    if min(lengths) <= recent:
        raise ValueError(f"lengths must exceed recent={recent}, got {min(lengths)}")
    points = []
    for name, transform in (transforms or compared()).items():
        generator = torch.Generator().manual_seed(seed)
        for length in lengths:
            if progress:
                progress(f"figure 1: {name}, {length:,} keys")
            ranges = [(0, length), (length // ratio, length), (0, recent)]
            sums = sample_ranges(transform, length, ranges, samples, generator)
            entropy, share = estimate(sums.entropy), estimate(sums.share(0))
            points.append(
                ContextPoint(
                    *(name, length, samples),
                    *(entropy.mean[0].item(), entropy.error[0].item()),
                    *(entropy.mean[1].item(), entropy.error[1].item()),
                    *(share.mean[2].item(), share.error[2].item()),
                )
            )
    return ContextFigure(tuple(points), ratio, recent, seed)


@dataclasses.dataclass(frozen=True)
class GrowthCurve:
    """E[H over [t, t·delta)] in nats, with standard errors, and its fits against log t and √log t."""

    delta: int
    starts: list[int]
    entropy: list[float]
    error: list[float]
    log_fit: Fit
    sqrt_fit: Fit


@dataclasses.dataclass(frozen=True)
class GrowthFigure:
    """Figures 2 and 6: how the expected entropy inside [t, tΔ) grows with t."""

    name: str
    method: str
    curves: tuple[GrowthCurve, ...]
    samples: int
    seed: int

    def save(self, folder: Path) -> list[Path]:
        """Write ``{name}.csv`` and ``.json``; returns their paths."""
        rows = [
            {"method": self.method, "delta": curve.delta, "start": start, "entropy": value, "error": error}
            for curve in self.curves
            for start, value, error in zip(curve.starts, curve.entropy, curve.error, strict=True)
        ]
        return write_data(folder, self.name, rows, self)


def growth_figure(
    name: str,
    method: str,
    logits: LogitTransform,
    longest: int = 1 << 20,
    samples: int = 4000,
    seed: int = 0,
    progress: Progress | None = None,
) -> GrowthFigure:
    """Figure 2 with scale-invariant logits, figure 6 with plain ones; ranges end by ``longest`` tokens."""
    curves = []
    for index, delta in enumerate(DELTAS):
        if progress:
            progress(f"{name}: {method}, Δ = {delta}")
        starts = power_starts(longest, delta)
        sampled = expected_range_entropy(logits, starts, delta, samples, seed + index)
        values, errors = sampled.mean.tolist(), sampled.error.tolist()
        log_fit, sqrt_fit = fit(starts, values, "log t", errors), fit(starts, values, "√log t", errors)
        curves.append(GrowthCurve(delta, starts, values, errors, log_fit, sqrt_fit))
    return GrowthFigure(name, method, tuple(curves), samples, seed)
