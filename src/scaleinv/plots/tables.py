"""The tables of a comparison and the paper's own: as aligned text, Markdown, CSV and JSON.

The numbers are those of ``summary.json``, which `scaleinv compare` and `scaleinv needle` write.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from scaleinv import lengths
from scaleinv.eval.summary import Measurement, Measurements, Summary, lengths_of
from scaleinv.files import write_data, write_text
from scaleinv.plots import style

METHOD = "scale-invariant-p-rope"
"""The row that the paper proposes."""

PAPER_SETTING = "paper, 162 M parameters, 4k training length"
PAPER_TRAIN_LENGTH = 4096
PAPER_LENGTHS = ("1x", "4x", "16x")

# Validation loss, mean of 3 seeds, and needle accuracy after 300 steps of fine-tuning, at PAPER_LENGTHS.
PAPER_LOSS: dict[str, tuple[float, float, float]] = {
    "rope": (3.261, 3.936, 5.260),
    "p-rope": (3.260, 3.984, 5.735),
    "nope": (3.397, 6.430, 8.125),
    "rope+ntk": (3.261, 3.703, 5.430),
    "yarn": (3.261, 3.958, 5.353),
    "logn+rope": (3.260, 3.273, 3.378),
    "logn+p-rope": (3.256, 3.262, 3.317),
    "logn+ntk": (3.261, 3.272, 3.394),
    "alibi": (3.281, 3.272, 3.270),
    "scale-invariant-p-rope": (3.244, 3.235, 3.247),
    "infini-rope": (3.296, 3.302, 3.310),
    "infini-p-rope": (3.295, 3.303, 3.311),
}
PAPER_NEEDLE: dict[str, tuple[float, float, float]] = {
    "rope": (0.962, 0.000, 0.000),
    "p-rope": (0.966, 0.250, 0.000),
    "nope": (0.964, 0.303, 0.000),
    "rope+ntk": (0.962, 0.217, 0.000),
    "yarn": (0.969, 0.000, 0.000),
    "logn+rope": (0.965, 0.276, 0.064),
    "logn+p-rope": (0.969, 0.962, 0.939),
    "logn+ntk": (0.962, 0.253, 0.056),
    "alibi": (0.957, 0.020, 0.003),
    "scale-invariant-p-rope": (0.965, 0.969, 0.969),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    text: str
    value: float | None = None
    """To sort by; None where there is no number."""
    best: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows by name, and the same numbers as records, one for each row and length."""

    name: str
    caption: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[Cell, ...]]
    records: tuple[dict[str, Any], ...]
    kind: str = "row"
    """What the rows are: "row" for methods, or "tau"."""

    def markdown(self) -> str:
        """A Markdown table, best in bold."""
        lines = [[self.kind, *self.columns], ["---", *("---:" for _ in self.columns)]]
        for row, cells in self.rows.items():
            name = html.escape(row, quote=False).replace("|", r"\|")
            lines.append([name, *(f"**{cell.text}**" if cell.best else cell.text for cell in cells)])
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
    """Rows × lengths, and the change from the shortest length to the longest."""
    found = [estimate for by_length in summary.loss.values() for estimate in by_length.values()]
    counts = sorted({estimate.record["seeds"] for estimate in found} - {None})
    seeds = f", {' or '.join(map(str, counts))} seed{'s' * (counts[-1] > 1)}" if counts else ""
    over = f" {summary.settings['stderr']}" if isinstance(summary.settings.get("stderr"), str) else ""
    spread = f", mean ± standard error{over}" if any(estimate.low is not None for estimate in found) else ""
    caption = f"Validation loss (nats per token){spread}{seeds}"
    table = _table("loss", caption, summary.loss, summary.train_length, min)
    keys, changed = lengths_of(summary.loss, summary.train_length), changes(summary)
    if len(keys) < 2:
        return table
    moved = {row: Cell(signed(changed[row]), changed[row]) if row in changed else Cell("–") for row in table.rows}
    columns = (*table.columns, f"{lengths.label(keys[0])} → {lengths.label(keys[-1])}")
    return dataclasses.replace(table, columns=columns, rows={row: (*x, moved[row]) for row, x in table.rows.items()})


def needle_table(summary: Summary) -> Table:
    """Rows × lengths, accuracy over needles."""
    caption = "Needle in a haystack: share of needles found (95 % Wilson interval)"
    return _table("needle", caption, summary.needle, summary.train_length, max)


def sweep_table(sweep: Measurements, train_length: int | None) -> Table:
    """Values of τ × lengths; see `scaleinv.eval.summary.read_sweep`."""
    caption = "Validation loss (nats per token) by lengthscale τ (tokens)"
    return _table("tau-sweep", caption, sweep, train_length, min, kind="tau")


def paper_table(name: str, caption: str, numbers: Mapping[str, tuple[float, ...]], rows: Iterable[str]) -> Table:
    """The paper's numbers for those of ``rows`` that it has, or for all if it has none of them."""
    estimates = {
        row: {
            key: Measurement(value, None, None, f"{value:.3f}", {"value": value})
            for key, value in zip(PAPER_LENGTHS, numbers[row], strict=True)
        }
        for row in [row for row in rows if row in numbers] or numbers
    }
    best = max if numbers is PAPER_NEEDLE else min
    return _table(name, f"{caption} ({PAPER_SETTING})", estimates, PAPER_TRAIN_LENGTH, best)


def changes(summary: Summary) -> dict[str, float]:
    """By row, the loss at the longest length less the loss at the shortest, where both are finite."""
    keys = lengths_of(summary.loss, summary.train_length)
    if len(keys) < 2:
        return {}
    both = {
        row: (x[keys[0]].value, x[keys[-1]].value) for row, x in summary.loss.items() if {keys[0], keys[-1]} <= set(x)
    }
    return {row: last - first for row, (first, last) in both.items() if math.isfinite(last - first)}


def row_label(row: str) -> str:
    """A row's name for people; an unknown row keeps its own."""
    return style.METHODS[row].label if row in style.METHODS else row


def signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def _table(
    name: str,
    caption: str,
    estimates: Measurements,
    train_length: int | None,
    best: Callable[[list[float]], float],
    kind: str = "row",
) -> Table:
    keys = lengths_of(estimates, train_length)
    rows = {row: [_cell(by_length.get(key)) for key in keys] for row, by_length in estimates.items()}
    for column in range(len(keys)):
        values = [cells[column].value for cells in rows.values()]
        # Rows that read the same are equally good; an accuracy of 0 is not.
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
