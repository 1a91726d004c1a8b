"""How a quantity grows with the distance t: least-squares fits against log t, √log t, or a constant."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

Against = Literal["log t", "√log t", "constant"]

_AXES: dict[Against, Callable[[float], float]] = {
    "log t": math.log,
    "√log t": lambda t: math.sqrt(math.log(t)),
    "constant": lambda t: 0.0,
}


@dataclasses.dataclass(frozen=True)
class Fit:
    """value ≈ intercept + slope · (log t or √log t)."""

    against: Against
    slope: float
    intercept: float
    error: float
    """Standard error of the slope; of the intercept for a constant."""
    r2: float
    """Share of the variance explained: 1 for a perfect fit, 0 for a constant."""

    def __call__(self, t: float) -> float:
        return self.intercept + self.slope * _AXES[self.against](t)


def fit(
    starts: Sequence[float], values: Sequence[float], against: Against, errors: Sequence[float] | None = None
) -> Fit:
    """Ordinary least squares. The slope's error comes from the values' ``errors``; without them, from the residuals."""
    if against not in _AXES:
        raise ValueError(f"against must be one of {', '.join(_AXES)}, got {against!r}")
    count = len(starts)
    if count < 3 or len(values) != count or (errors is not None and len(errors) != count):
        raise ValueError(f"starts, values and errors must be equally long, at least 3, got {count}, {len(values)}")
    x = [_AXES[against](t) for t in starts]
    x_mean, y_mean = sum(x) / count, sum(values) / count
    spread = sum((u - x_mean) ** 2 for u in x)
    # Both estimates are linear in the values; these are the coefficients.
    leverage = [(u - x_mean) / spread for u in x] if spread > 0 else [1 / count] * count
    slope = sum(c * y for c, y in zip(leverage, values, strict=True)) if spread > 0 else 0.0
    intercept = y_mean - slope * x_mean
    residual = sum((y - intercept - slope * u) ** 2 for u, y in zip(x, values, strict=True))
    variance = sum((y - y_mean) ** 2 for y in values)
    if errors is None:
        errors = [math.sqrt(residual / (count - 2))] * count
    error = math.sqrt(sum((c * e) ** 2 for c, e in zip(leverage, errors, strict=True)))
    return Fit(against, slope, intercept, error, 1 - residual / variance if variance > 0 else 1.0)


def log_likelihood_ratio(
    better: Fit, worse: Fit, starts: Sequence[float], values: Sequence[float], errors: Sequence[float]
) -> float:
    """log of how much likelier the values are under one fit than under another, with Gaussian ``errors``."""
    return sum(
        ((y - worse(t)) ** 2 - (y - better(t)) ** 2) / (2 * e * e)
        for t, y, e in zip(starts, values, errors, strict=True)
    )
