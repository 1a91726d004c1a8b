"""The tables of a comparison and the paper's own: as aligned text, Markdown, CSV and JSON.

The numbers are those of ``summary.json``, which `scaleinv compare` and `scaleinv needle` write.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleinv import lengths
from scaleinv.analysis.paired import Difference
from scaleinv.eval.summary import Measurement, Measurements, Summary, lengths_of, ordered_methods
from scaleinv.files import write_data, write_text
from scaleinv.plots import paper, style
from scaleinv.plots.units import Unit

METHOD = "scale-invariant-p-rope"
"""The method that the paper proposes."""


@dataclasses.dataclass(frozen=True)
class Cell:
    text: str
    value: float | None = None
    """The number to sort by; None if there is none."""
    best: bool = False
    noise: bool = False
    """Within noise of the method that it is compared with."""


@dataclasses.dataclass(frozen=True)
class Table:
    """Lines by name, and the same numbers as records."""

    name: str
    caption: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[Cell, ...]]
    records: tuple[dict[str, Any], ...]
    kind: str = "method"
    """What the lines are: "method" or "tau"."""

    def markdown(self) -> str:
        """A Markdown table: best in bold, within noise in italics."""
        lines = [[self.kind, *self.columns], ["---", *("---:" for _ in self.columns)]]
        for row, cells in self.rows.items():
            name = html.escape(row, quote=False).replace("|", r"\|")
            lines.append([name, *(_emphasised(cell) for cell in cells)])
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def text(self) -> str:
        """Aligned columns for a terminal, best marked with ``*``."""
        lines = [["", *(f"{column} " for column in self.columns)]]
        lines += [[row, *(cell.text + " *"[cell.best] for cell in cells)] for row, cells in self.rows.items()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines)
        return "\n".join("  ".join(line).rstrip() for line in aligned)

    def save(self, folder: Path) -> list[Path]:
        """Write ``{name}.csv``, ``.json`` and ``.md``; returns their paths."""
        markdown = folder / f"{self.name}.md"
        paths = write_data(folder, self.name, self.records, self)
        write_text(markdown, f"{self.caption}\n\n{self.markdown()}")
        return [*paths, markdown]


def terminal_table(summary: Summary) -> str:
    """The loss table as aligned text, best of each column marked with ``*``.

    >>> loss = {"rope": {"1x": {"mean": 1.5}, "16x": {"mean": 2.5}}, "alibi": {"16x": {"mean": 1.6}}}
    >>> from scaleinv.eval.summary import parse_summary
    >>> summary = parse_summary({"loss": loss, "settings": {"train_length": 512}}, "example")
    >>> for line in terminal_table(summary).splitlines():
    ...     line
    'Validation loss (nats per token)'
    '       1× (512)   16× (8k)   1× → 16×'
    'rope      1.500*     2.500     +1.000'
    'alibi         –      1.600*         –'
    """
    table = loss_table(summary)
    return f"{table.caption}\n{table.text()}"


def loss_table(summary: Summary) -> Table:
    """Methods × lengths, and the change from the shortest length to the longest."""
    found = [estimate for by_length in summary.loss.values() for estimate in by_length.values()]
    counts = sorted({estimate.record["seeds"] for estimate in found} - {None})
    seeds = f", {' or '.join(map(str, counts))} seed{'s' * (counts[-1] > 1)}" if counts else ""
    over = f" {summary.settings['stderr']}" if isinstance(summary.settings.get("stderr"), str) else ""
    spread = f", mean ± standard error{over}" if any(estimate.low is not None for estimate in found) else ""
    caption = f"Validation loss ({Unit.of(summary.settings).nats}){spread}{seeds}"
    table = _table("loss", caption, summary.loss, summary.train_length, min)
    keys, changed = lengths_of(summary.loss, summary.train_length), changes(summary)
    if len(keys) < 2:
        return table
    moved = {row: Cell(signed(changed[row]), changed[row]) if row in changed else Cell("–") for row in table.rows}
    columns = (*table.columns, f"{lengths.label(keys[0])} → {lengths.label(keys[-1])}")
    return dataclasses.replace(table, columns=columns, rows={row: (*x, moved[row]) for row, x in table.rows.items()})


def needle_table(summary: Summary) -> Table:
    """Methods × lengths, accuracy over needles."""
    caption = "Needle in a haystack: share of needles found (95 % Wilson interval)"
    return _table("needle", caption, summary.needle, summary.train_length, max)


def bits_table(summary: Summary) -> Table | None:
    """The losses in bits per byte of text; None if the length of the tokens is unknown."""
    unit = Unit.of(summary.settings)
    found: Measurements = {}
    for method, by_length in summary.loss.items():
        for key, loss in by_length.items():
            bits = unit.bits_per_byte(loss.value)
            if bits is None:
                return None
            text = f"{bits:.3f}" if math.isfinite(bits) else loss.text
            measured = Measurement(bits, None, None, text, {"bits_per_byte": bits})
            found.setdefault(method, {})[key] = measured
    return _table("bits-per-byte", "Validation loss (bits per byte)", found, summary.train_length, min)


def difference_table(
    found: Mapping[str, Mapping[str, Difference]], train_length: int | None, unit: Unit, base: str = METHOD
) -> Table | None:
    """Methods × lengths, the loss minus that of ``base``, with its paired standard error; None without any."""
    keys = lengths.ordered((key for by_length in found.values() for key in by_length), train_length)
    if not keys:
        return None
    differences = [item for by_length in found.values() for item in by_length.values()]
    pairs = "windows of the same seeds" if any(item.windows for item in differences) else "seeds"
    error = " ± paired standard error" if any(item.error for item in differences) else ""
    caption = f"Loss minus that of {method_label(base)} ({unit.nats}), mean over the same {pairs}{error}"
    if error:
        caption += ". In italics and grey: within noise, since zero lies inside the 95 % interval (Student's t)"
    ordered = ordered_methods(found)
    rows = {
        method: tuple(_difference_cell(found[method][key]) if key in found[method] else Cell("–") for key in keys)
        for method in ordered
    }
    records = tuple(
        {
            **{"method": method, "length": key, "multiple": lengths.multiple(key, train_length)},
            **{"difference": item.value, "stderr": item.error, "seeds": item.seeds, "windows": item.windows},
            "within_noise": item.within_noise if item.error is not None else None,
        }
        for method in ordered
        for key in keys
        if (item := found[method].get(key)) is not None
    )
    columns = tuple(lengths.label(key, train_length) for key in keys)
    return Table("differences", caption, columns, rows, records)


def model_table(parameters: Mapping[str, int], seconds: Mapping[str, Sequence[float]]) -> Table | None:
    """Trained models: parameters and training time, mean over seeds; None if neither is known."""
    names = ordered_methods([*parameters, *seconds])
    if not names:
        return None
    rows: dict[str, tuple[Cell, ...]] = {}
    records = []
    for name in names:
        count, times = parameters.get(name), seconds.get(name)
        mean = sum(times) / len(times) if times else None
        rows[name] = (
            Cell("–" if count is None else f"{count:,}", count),
            Cell("–" if mean is None else f"{mean / 60:.1f}", mean),
        )
        records.append({"method": name, "parameters": count, "seconds": mean, "seeds": len(times or ())})
    caption = "Trained models. Time of all training steps, without validation, mean over seeds"
    return Table("models", caption, ("parameters", "minutes"), rows, tuple(records))


def sweep_table(sweep: Measurements, train_length: int | None, unit: Unit) -> Table:
    """Values of τ × lengths; see `scaleinv.eval.summary.read_sweep`."""
    caption = f"Validation loss ({unit.nats}) by lengthscale τ (tokens)"
    return _table("tau-sweep", caption, sweep, train_length, min, kind="tau")


def paper_table(name: str, caption: str, numbers: Mapping[str, tuple[float, ...]], methods: Iterable[str]) -> Table:
    """The paper's numbers for those of ``methods`` that it has, or for all if it has none of them."""
    found = {
        method: {
            key: Measurement(value, None, None, f"{value:.3f}", {"value": value})
            for key, value in zip(paper.LENGTHS, numbers[method], strict=True)
        }
        for method in [method for method in methods if method in numbers] or numbers
    }
    best = max if numbers is paper.NEEDLE else min
    return _table(name, f"{caption} ({paper.SETTING})", found, paper.TRAIN_LENGTH, best)


def changes(summary: Summary) -> dict[str, float]:
    """By method, the loss at the longest length minus the loss at the shortest, if both are finite."""
    keys = lengths_of(summary.loss, summary.train_length)
    if len(keys) < 2:
        return {}
    both = {
        row: (x[keys[0]].value, x[keys[-1]].value) for row, x in summary.loss.items() if {keys[0], keys[-1]} <= set(x)
    }
    return {row: last - first for row, (first, last) in both.items() if math.isfinite(last - first)}


def method_label(method: str) -> str:
    """A method's name for people; an unknown one keeps its own."""
    known = style.known(method)
    return method if known is None else known.label


def signed(value: float) -> str:
    """The number with its sign, unless it rounds to zero."""
    return f"{value:+.3f}".replace("-", "−") if round(value, 3) else "0.000"


def _table(
    name: str,
    caption: str,
    estimates: Measurements,
    train_length: int | None,
    best: Callable[[list[float]], float],
    kind: str = "method",
) -> Table:
    keys = lengths_of(estimates, train_length)
    rows = {row: [_cell(by_length.get(key)) for key in keys] for row, by_length in estimates.items()}
    for column in range(len(keys)):
        values = [cells[column].value for cells in rows.values()]
        # Numbers that read the same are equally good; an accuracy of 0 is not.
        target = best([round(value, 3) for value in values if value is not None] or [0.0])
        for cells in rows.values():
            value = cells[column].value
            won = value is not None and target != 0 and round(value, 3) == target
            cells[column] = dataclasses.replace(cells[column], best=won)
    records = tuple(
        {kind: row, "length": key, "multiple": lengths.multiple(key, train_length), **by_length[key].record}
        for row, by_length in estimates.items()
        for key in keys
        if key in by_length
    )
    columns = tuple(lengths.label(key, train_length) for key in keys)
    return Table(name, caption, columns, {row: tuple(cells) for row, cells in rows.items()}, records, kind)


def _cell(estimate: Measurement | None) -> Cell:
    if estimate is None:
        return Cell("–")
    return Cell(estimate.text, estimate.value if math.isfinite(estimate.value) else None)


def _difference_cell(found: Difference) -> Cell:
    error = "" if found.error is None else f" ± {found.error:.3f}"
    return Cell(f"{signed(found.value)}{error}", found.value, noise=found.within_noise)


def _emphasised(cell: Cell) -> str:
    return f"**{cell.text}**" if cell.best else f"*{cell.text}*" if cell.noise else cell.text
