"""summary.json and sweep.json, the results of a comparison: their one reader and writer.

``summary.json`` has three parts: ``loss`` and ``needle``, each by method and then by length, and ``settings``.
`scaleinv compare` writes the losses and `scaleinv needle` the accuracies; neither touches the other's part.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from scaleinv import lengths, methods
from scaleinv.adaptation import VARIANTS
from scaleinv.files import read_json, write_json

SUMMARY = "summary.json"
SWEEP = "sweep.json"
ADVICE = "`scaleinv compare` writes it: delete a damaged file and run it again"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A number with its uncertainty: a loss ± its standard error, or an accuracy and its interval."""

    value: float
    """NaN if a run diverged."""
    low: float | None
    high: float | None
    text: str
    record: dict[str, Any]
    """The record as it is in the file."""


Measurements = dict[str, dict[str, Measurement]]
"""By method (or lengthscale), then by length."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """``summary.json``, checked."""

    loss: Measurements = dataclasses.field(default_factory=dict)
    needle: Measurements = dataclasses.field(default_factory=dict)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def train_length(self) -> int | None:
        return self.settings.get("train_length")

    def to_json(self) -> dict[str, Any]:
        return {"loss": _records(self.loss), "needle": _records(self.needle), "settings": self.settings}

    def with_loss(self, found: Measurements, settings: Mapping[str, Any], *, asked: Iterable[str]) -> Summary:
        """A copy with the losses of a comparison of some methods. Losses of other methods and all needles stay.

        Args:
            found: what the comparison has measured so far.
            settings: of the comparison; they replace all except the needle's.
            asked: the methods of the comparison. Their earlier losses are dropped.
        """
        asked = set(asked)
        merged = {name: by for name, by in self.loss.items() if name not in asked} | found
        kept = {"needle": self.settings["needle"]} if "needle" in self.settings else {}
        ordered = {name: merged[name] for name in ordered_methods(merged)}
        return Summary(ordered, self.needle, {**settings, **kept})

    def with_needle(self, found: Measurements, settings: Mapping[str, Any], train_length: int) -> Summary:
        """A copy with the accuracies of some methods; everything else stays."""
        merged = {**self.needle, **found}
        ordered = {name: merged[name] for name in ordered_methods(merged)}
        changed = {**self.settings, "needle": dict(settings)}
        return Summary(self.loss, ordered, {"train_length": train_length, **changed})


def read_summary(path: Path) -> Summary:
    """Read and check ``summary.json``."""
    return parse_summary(read_json(path, ADVICE), str(path))


def read_summary_if_any(path: Path) -> Summary:
    """`read_summary`, or an empty one if there is no file yet."""
    return read_summary(path) if path.exists() else Summary()


def write_summary(path: Path, summary: Summary) -> None:
    """Write ``summary.json``, whole or not at all."""
    write_json(path, summary.to_json())


def parse_summary(data: Any, where: str) -> Summary:
    """Check a parsed ``summary.json``; ``where`` is named in errors."""
    data = mapping(data, where)
    settings = mapping(data.get("settings", {}), f"{where}: settings")
    length = settings.get("train_length")
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise ValueError(f"{where}: settings.train_length must be a positive number of tokens, got {length!r}")
    loss = parse_methods(data.get("loss", {}), f"{where}: loss", parse_loss)
    needle = parse_methods(data.get("needle", {}), f"{where}: needle", parse_accuracy)
    for key in [key for part in (loss, needle) for by_length in part.values() for key in by_length]:
        multiple(key, length, where)
    return Summary(loss, needle, dict(settings))


def read_sweep(path: Path, train_length: int | None) -> Measurements:
    """``sweep.json``: losses by τ, smallest first, then by length."""
    taus = parse_methods(mapping(read_json(path, ADVICE), str(path)).get("tau", {}), f"{path}: tau", parse_loss)
    for tau, by_length in taus.items():
        if not re.fullmatch(r"\d+(\.\d+)?(e[-+]?\d+)?", tau) or not float(tau):
            raise ValueError(f"{path}: tau must be a positive number of tokens, got {tau!r}")
        for key in by_length:
            multiple(key, train_length, str(path))
    return {tau: taus[tau] for tau in sorted(taus, key=float)}


def write_sweep(path: Path, sweep: Measurements) -> None:
    """Write ``sweep.json``, smallest τ first."""
    write_json(path, {"tau": _records({tau: sweep[tau] for tau in sorted(sweep, key=float)})})


def parse_methods(data: Any, where: str, parse: Callable[[Any, str], Measurement]) -> Measurements:
    """Measurements by method and length, methods in the paper's order."""
    data = mapping(data, where)
    return {
        name: {
            key: parse(value, f"{where}.{name}.{key}") for key, value in mapping(data[name], f"{where}.{name}").items()
        }
        for name in ordered_methods(data)
    }


def parse_loss(data: Any, where: str) -> Measurement:
    """``{"mean", "stderr", "seeds"}``; the last two may be missing or null."""
    data = mapping(data, where)
    mean, error = number(data, "mean", where), number(data, "stderr", where, optional=True)
    seeds = data.get("seeds")
    if seeds is not None and (not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1):
        raise ValueError(f"{where}: seeds must be a positive whole number, got {seeds!r}")
    return loss(mean, error, seeds)


def loss(mean: float, stderr: float | None, seeds: int | None) -> Measurement:
    """A loss as a measurement, in nats per token; a mean that is not finite stands for a run that diverged."""
    record = {"mean": mean, "stderr": stderr, "seeds": seeds}
    if not math.isfinite(mean):
        return Measurement(math.nan, None, None, "diverged", record)
    if not stderr or not math.isfinite(stderr):
        return Measurement(mean, None, None, f"{mean:.3f}", record)
    return Measurement(mean, mean - stderr, mean + stderr, f"{mean:.3f} ± {stderr:.3f}", record)


def parse_accuracy(data: Any, where: str) -> Measurement:
    """``{"accuracy", "low", "high", "samples", "seeds"}``; the last four may be missing or null."""
    data = mapping(data, where)
    value = number(data, "accuracy", where)
    low, high = (number(data, key, where, optional=True) for key in ("low", "high"))
    if not 0 <= value <= 1:
        raise ValueError(f"{where}: accuracy must be between 0 and 1, got {value}")
    text = f"{value:.3f}" if low is None or high is None else f"{value:.3f} ({low:.2f}–{high:.2f})"
    samples, seeds = data.get("samples", data.get("needles")), data.get("seeds")
    record = {"accuracy": value, "low": low, "high": high, "samples": samples}
    return Measurement(value, low, high, text, record if seeds is None else {**record, "seeds": seeds})


def mapping(data: Any, where: str) -> Mapping[str, Any]:
    """``data`` if it is a JSON object; otherwise ValueError says where it is not."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} must be a JSON object, got {data!r:.60}")
    return data


def number(data: Mapping[str, Any], key: str, where: str, *, optional: bool = False) -> Any:
    """``data[key]`` as a float; null is NaN, or None if optional (as is a missing key)."""
    if key not in data and not optional:
        raise ValueError(f"{where} has no {key!r}")
    value = data.get(key)
    if value is None:
        return None if optional else math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{where}: {key} must be a number, got {value!r:.60}")
    return float(value)


def multiple(key: str, train_length: int | None, where: str = "length") -> float:
    """`scaleinv.lengths.multiple` with an error that says where the length stands."""
    try:
        return lengths.multiple(key, train_length)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def ordered_methods(found: Iterable[str]) -> list[str]:
    """Each method once, in the paper's order, or each variant of a pretrained model in its; unknown ones last."""
    found = list(found)
    adapted = any(name in VARIANTS and name not in methods.ROWS for name in found)
    order = list(VARIANTS) if adapted else methods.names()
    return sorted(dict.fromkeys(found), key=lambda name: order.index(name) if name in order else len(order))


def lengths_of(found: Measurements, train_length: int | None) -> list[str]:
    """The lengths that any method has, shortest first."""
    return lengths.ordered((key for by_length in found.values() for key in by_length), train_length)


def _records(found: Measurements) -> dict[str, dict[str, Any]]:
    return {name: {key: value.record for key, value in by.items()} for name, by in found.items()}
