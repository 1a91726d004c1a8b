"""Differences between methods, paired: the same seeds, and the same windows of validation text.

Two methods share most of what makes a loss high or low: the text, and often the seed's luck. The difference of each
pair cancels that, so its standard error is far below those of the two losses. The numbers are those of
``evaluations/<method>-seed<n>.json``, which `scaleinv evaluate` writes.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from scaleinv.eval.loss import Evaluation, read_evaluation

# Student's t at 97.5 % by degrees of freedom; beyond the table 1.96 + 2.7/df is on the safe side.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclasses.dataclass(frozen=True)
class SeedLoss:
    """Loss of one method with one seed at one length."""

    mean: float
    windows: tuple[float, ...] = ()
    """Loss of each window, in the order of the text; empty if the file does not say."""


SeedLosses = dict[str, dict[str, dict[int, SeedLoss]]]
"""By method, then length, then seed."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """A method's loss minus the base's, mean over pairs."""

    value: float
    error: float | None
    """Paired standard error; None if there is a single pair."""
    seeds: int
    windows: int | None
    """Windows per seed; None if only the means of seeds are paired."""
    limit: float = math.nan
    """How many standard errors are within noise, at 95 %."""

    @property
    def within_noise(self) -> bool:
        """Whether the difference could be zero, at 95 %."""
        return self.error is not None and abs(self.value) <= self.limit * self.error


def read_evaluations(folder: Path) -> list[Evaluation]:
    """The evaluations of a results folder, without those of checkpoints along the way."""
    found = [read_evaluation(path) for path in sorted(folder.glob("*.json"))]
    return [evaluation for evaluation in found if evaluation.step is None]


def seed_losses(evaluations: Iterable[Evaluation]) -> SeedLosses:
    """Losses by method, length and seed."""
    found: SeedLosses = {}
    for evaluation in evaluations:
        for key, at in evaluation.lengths.items():
            loss = SeedLoss(at.mean, tuple(at.losses))
            found.setdefault(evaluation.method, {}).setdefault(key, {})[evaluation.seed] = loss
    return found


def paired_differences(losses: SeedLosses, base: str) -> dict[str, dict[str, Difference]]:
    """By method and length, the loss minus that of ``base`` with the same seeds, if both were measured.

    >>> losses = {"a": {"1x": {0: SeedLoss(1.2), 1: SeedLoss(1.4)}}, "b": {"1x": {0: SeedLoss(1.0), 1: SeedLoss(1.1)}}}
    >>> found = paired_differences(losses, "b")["a"]["1x"]
    >>> round(found.value, 3), round(found.error, 3), found.within_noise
    (0.25, 0.05, True)
    """
    found: dict[str, dict[str, Difference]] = {}
    for method, by_length in losses.items():
        for key, seeds in by_length.items():
            other = losses.get(base, {}).get(key, {})
            pairs = [(seeds[seed], other[seed]) for seed in sorted(seeds.keys() & other.keys())]
            pairs = [pair for pair in pairs if all(math.isfinite(loss.mean) for loss in pair)]
            if pairs and method != base:
                found.setdefault(method, {})[key] = _difference(pairs)
    return found


def _difference(pairs: Sequence[tuple[SeedLoss, SeedLoss]]) -> Difference:
    counts = {len(loss.windows) for pair in pairs for loss in pair}
    if len(counts) == 1 and max(counts) > 1:
        table = [[x - y for x, y in zip(ours.windows, base.windows, strict=True)] for ours, base in pairs]
    else:
        table = [[ours.mean - base.mean] for ours, base in pairs]
    seeds, windows = len(table), len(table[0])
    value = statistics.fmean(x for row in table for x in row)
    freedom = min(count for count in (seeds, windows) if count > 1) - 1 if max(seeds, windows) > 1 else 0
    error = standard_error(table)
    return Difference(value, error, seeds, windows if windows > 1 else None, student(freedom) if freedom else math.nan)


def standard_error(table: Sequence[Sequence[float]]) -> float | None:
    """Standard error of the mean of a table, seeds × windows, both of them samples; None for a single number.

    The variances of the mean over seeds and over windows add up. Both contain what neither explains, so that is
    subtracted once.
    """
    seeds, windows = len(table), len(table[0])
    if max(seeds, windows) == 1:
        return None
    mean = statistics.fmean(x for row in table for x in row)
    rows = [statistics.fmean(row) for row in table]
    columns = [statistics.fmean(column) for column in zip(*table, strict=True)]
    if min(seeds, windows) == 1:
        values = rows if windows == 1 else columns
        return statistics.stdev(values) / math.sqrt(len(values))
    over_seeds, over_windows = statistics.variance(rows) / seeds, statistics.variance(columns) / windows
    rest = sum((table[s][w] - rows[s] - columns[w] + mean) ** 2 for s in range(seeds) for w in range(windows))
    rest /= (seeds - 1) * (windows - 1) * seeds * windows
    return math.sqrt(max(over_seeds + over_windows - rest, over_seeds, over_windows))


def student(freedom: int) -> float:
    """Student's t at 97.5 %."""
    return _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.7 / freedom
