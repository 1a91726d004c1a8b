"""The report of a comparison: one self-contained page, its figures for papers, and its tables.

The page is ``page.html`` of this package with ``page.css`` and ``page.js`` inside; nothing is fetched.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from scaleinv.eval.summary import SUMMARY, SWEEP, Summary, lengths_of, read_summary, read_sweep
from scaleinv.files import write_text
from scaleinv.lengths import label as length_label
from scaleinv.lengths import multiple
from scaleinv.plots import compare, needle
from scaleinv.plots.compare import Chart, HeatMap
from scaleinv.plots.tables import (
    METHOD,
    PAPER_LOSS,
    PAPER_NEEDLE,
    Table,
    changes,
    loss_table,
    needle_table,
    paper_table,
    row_label,
    signed,
    sweep_table,
    terminal_table,
)
from scaleinv.version import VERSION

__all__ = ["terminal_table", "write_report"]

CAPTIONS = {
    "figure1-gaussian": "Figure 1, top: entropy and share of recent tokens against context length, Gaussian scores.",
    "figure1-model": "Figure 1, bottom: entropy and share of recent tokens against context length, trained models.",
    "figure2": "Figure 2: expected entropy inside [t, tΔ), scale-invariant logits.",
    "figure6": "Figure 6: expected entropy inside [t, tΔ), plain logits.",
    "ranges": "Attention by range of distances, in a trained model.",
    "qq-rotary": "Figures 9 – 14: quantiles of a model's scores against a Gaussian's, with the rotary embedding.",
    "qq-no-rotary": "Figures 9 – 14: quantiles of a model's scores against a Gaussian's, without the rotary embedding.",
}
"""Of figures that the analysis makes; others are captioned with their names."""

DARK_PAGE = "#15181C"
"""The page in the dark: --page in page.css."""

LARGEST_SVG = 500_000
"""Bytes; of a larger figure the PNG is shown, if there is one."""


@dataclasses.dataclass(frozen=True)
class Section:
    name: str
    title: str
    body: str


def write_report(folder: Path, *, progress: Callable[[str], None] | None = None) -> Path:
    """Write ``report.html``, ``figures/`` and ``tables/`` to the results folder of a comparison; returns the page.

    Only ``summary.json`` must be there: parts that are missing are left out, and the page says which. A file that is
    there but malformed raises ValueError, with its name.

    Args:
        folder: what `scaleinv compare` wrote.
        progress: called with one line of text before each step.
    """
    folder = Path(folder)
    say = progress or (lambda text: None)
    say(f"reading {folder}")
    summary = read_summary(folder / SUMMARY)
    length = summary.train_length
    charts = {
        "by length": compare.by_length("loss-by-length", "Loss by context length", compare.LOSS, summary.loss, length),
        "by position": compare.by_position(folder / "evaluations", length),
        "training": compare.training(folder / "curves", length),
        "needle": compare.by_length("needle-by-length", "Needles found", compare.FOUND, summary.needle, length),
    }
    heat = compare.needle_depths(folder / "needle", length)
    sweep = read_sweep(folder / SWEEP, length) if (folder / SWEEP).exists() else {}
    charts["sweep"] = compare.sweep_chart(sweep, length)
    tables = {}
    if summary.loss:
        tables["loss"] = loss_table(summary)
    if summary.needle:
        tables["needle"] = needle_table(summary)
    if sweep:
        tables["sweep"] = sweep_table(sweep, length)

    for table in tables.values():
        table.save(folder / "tables")
    for drawn in [*charts.values(), heat]:
        if isinstance(drawn, Chart):
            say(f"drawing {drawn.name}")
            drawn.save(folder / "figures", folder / "tables")
        elif isinstance(drawn, HeatMap):
            say("drawing needle-depth")
            drawn.save(folder / "figures")

    sections = _sections(summary, tables, charts, heat, _analysis(folder / "analysis"))
    path = folder / "report.html"
    write_text(path, page(summary, sections, [chart for chart in charts.values() if chart]))
    say(f"wrote {path}")
    return path


def page(summary: Summary, sections: Iterable[Section], charts: Iterable[Chart]) -> str:
    """The whole page."""
    sections = list(sections)
    data = json.dumps({chart.name: _chart_data(chart) for chart in charts}, ensure_ascii=False)
    return Template(_asset("page.html")).substitute(
        title=escape(_title(summary)),
        headline=escape(headline(summary)),
        style=_asset("page.css"),
        script=_asset("page.js"),
        links="".join(f'<a href="#{section.name}">{escape(section.title)}</a>\n' for section in sections),
        sections="".join(_section(section) for section in sections),
        data=data.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e"),
        version=escape(VERSION),
    )


def headline(summary: Summary) -> str:
    """What the rows lose from the shortest length to the longest, and which is best there, in plain words."""
    keys = lengths_of(summary.loss, summary.train_length)
    if not keys:
        return "No losses were measured."
    sentences = []
    changed = sorted(changes(summary).items(), key=lambda item: item[1])
    if changed:
        few = changed if len(changed) <= 5 else [*changed[:2], changed[-1]]
        shown = [item for item in changed if item in few or item[0] == METHOD]
        parts = [f"{signed(change)} with {row_label(row)}" for row, change in shown]
        listed = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
        rest = f" ({len(changed)} methods in the table)" if len(shown) < len(changed) else ""
        ends = " to ".join(length_label(key, summary.train_length) for key in (keys[0], keys[-1]))
        unit = "" if not keys[-1].endswith("x") else " tokens" if summary.train_length else " the training length"
        sentences.append(f"From a context of {ends}{unit}, the loss in nats per token changes by {listed}{rest}.")
    last = [(x[keys[-1]].value, row) for row, x in summary.loss.items() if keys[-1] in x]
    ranked = sorted((value, row) for value, row in last if math.isfinite(value))
    if ranked:
        second = f"; next is {row_label(ranked[1][1])}, {ranked[1][0]:.3f}" if len(ranked) > 1 else ""
        best = f"{ranked[0][0]:.3f}, with {row_label(ranked[0][1])}{second}"
        sentences.append(f"The lowest loss at {length_label(keys[-1])} is {best}.")
    return " ".join(sentences) or "Every run diverged."


def on_dark(color: str) -> str:
    """A colour for dark pages: greys are mirrored, so that black is near-white, and dark hues are mixed with white.

    >>> on_dark("#000000"), on_dark("#DDCC77")
    ('#F5F5F5', '#DDCC77')
    """
    red, green, blue = _rgb(color)
    if red == green == blue:
        return "#" + f"{max(245 - red, 110):02X}" * 3
    while contrast(color, DARK_PAGE) < 4:
        red, green, blue = (value + math.ceil((255 - value) / 20) for value in (red, green, blue))
        color = f"#{red:02X}{green:02X}{blue:02X}"
    return color


def contrast(first: str, second: str) -> float:
    """Of two colours, 1 – 21, as the WCAG define it."""
    low, high = sorted(_luminance(color) for color in (first, second))
    return (high + 0.05) / (low + 0.05)


def _sections(
    summary: Summary,
    tables: Mapping[str, Table],
    charts: Mapping[str, Chart | None],
    heat: HeatMap | None,
    analysis: str,
) -> list[Section]:
    """What there is, and at the end what there is not."""
    bodies = {
        ("loss", "Loss"): "",
        ("length", "By length"): _figure(charts["by length"]),
        ("position", "By position"): _figure(charts["by position"]),
        ("training", "Training"): _figure(charts["training"]),
        ("needle", "Needle"): "",
        ("sweep", "τ sweep"): "",
        ("analysis", "Analysis"): analysis,
    }
    if "loss" in tables:
        paper = paper_table("paper-loss", "Validation loss", PAPER_LOSS, summary.loss)
        bodies["loss", "Loss"] = _beside(tables["loss"], paper)
    if "needle" in tables:
        paper = paper_table("paper-needle", "Needle accuracy", PAPER_NEEDLE, summary.needle)
        bodies["needle", "Needle"] = _beside(tables["needle"], paper) + _figure(charts["needle"])
    if heat:
        bodies["needle", "Needle"] += _heat(heat, summary.train_length)
    if "sweep" in tables:
        bodies["sweep", "τ sweep"] = _figure(charts["sweep"]) + _table(tables["sweep"])
    sections = [Section(name, title, body) for (name, title), body in bodies.items() if body]
    missing = [title.lower() for (_, title), body in bodies.items() if not body]
    note = f"<p>This folder has nothing for: {escape(', '.join(missing))}.</p>" if missing else ""
    return [*sections, Section("settings", "Settings", _settings(summary.settings) + note)]


def _section(section: Section) -> str:
    return (
        f'<section id="{section.name}" aria-labelledby="{section.name}-title">\n'
        f'<h2 id="{section.name}-title">{escape(section.title)}</h2>\n{section.body}</section>\n'
    )


def _beside(ours: Table, paper: Table) -> str:
    return f'<div class="pair">\n{_table(ours)}{_table(paper, note="")}</div>\n'


def _table(table: Table, note: str = ". Best in bold.") -> str:
    """A table whose headers sort it; the script reads ``data-value``."""
    corner = "method" if table.kind == "row" else "τ"
    header = "".join(
        f'<th scope="col"><button type="button">{escape(column)}</button></th>' for column in (corner, *table.columns)
    )
    lines = []
    for row, cells in table.rows.items():
        chosen = ' class="method"' if row == METHOD else ""
        line = [f'<tr{chosen}><th scope="row">{escape(row_label(row))}</th>']
        for cell in cells:
            value = "" if cell.value is None else f' data-value="{cell.value:.9g}"'
            number, _, spread = cell.text.partition(" ")
            text = f'{escape(number)}<span class="spread"> {escape(spread)}</span>' if spread else escape(number)
            line.append(f"<td{value}><strong>{text}</strong></td>" if cell.best else f"<td{value}>{text}</td>")
        lines.append("".join(line) + "</tr>\n")
    caption = escape(table.caption)
    return (
        f'<div class="scroll" role="region" aria-label="{caption}" tabindex="0">\n'
        f'<table class="sortable" id="table-{table.name}"><caption><span>{caption}{note}</span></caption>\n'
        f"<thead><tr>{header}</tr></thead>\n<tbody>\n{''.join(lines)}</tbody></table></div>\n"
    )


def _figure(chart: Chart | None) -> str:
    """A place for the script to draw in."""
    if chart is None:
        return ""
    links = _links(f"figures/{chart.name}.svg", f"figures/{chart.name}.png", f"tables/{chart.name}-points.csv")
    return (
        f'<figure class="chart" data-chart="{chart.name}">\n'
        f"<figcaption><strong>{escape(chart.title)}.</strong> {escape(chart.caption)}</figcaption>\n"
        f'<div class="legend" role="group" aria-label="Curves of {escape(chart.title)}"></div>\n'
        f'<div class="panels"><noscript>The charts need JavaScript; they are also in figures/.</noscript></div>\n'
        f'<p class="files">{links}</p>\n</figure>\n'
    )


def _chart_data(chart: Chart) -> dict[str, Any]:
    data = dataclasses.asdict(chart)
    for panel in data["panels"]:
        for series in panel["series"]:
            series["look"]["dark"] = on_dark(series["look"]["color"])
            series["points"] = [list(point.values()) for point in series["points"]]
    return data


def _heat(heat: HeatMap, train_length: int | None) -> str:
    """A table for each row, its cells coloured by the share of needles found, as in `scaleinv.plots.needle`."""
    import matplotlib
    from matplotlib.colors import to_hex

    colors = matplotlib.colormaps[needle.COLORS]
    trained = {key: ' class="trained"' for key in heat.lengths if multiple(key, train_length) == 1}
    header = "".join(f'<th scope="col">{escape(length_label(key))}</th>' for key in heat.lengths)
    maps = []
    for row, depths in heat.rows.items():
        lines = []
        for (start, end), at in depths.items():
            cells = []
            for key in heat.lengths:
                ink, style, title, text = "", "", "", "–"
                if key in at:
                    ink = "#000" if at[key].value > 0.55 else "#FFF"
                    style = f' style="background:{to_hex(colors(at[key].value))};color:{ink}"'
                    title, text = f' title="{escape(at[key].text)}"', f"{100 * at[key].value:.0f}"
                cells.append(f"<td{trained.get(key, '')}{style}{title}>{text}</td>")
            lines.append(f'<tr><th scope="row">{100 * start:.0f}–{100 * end:.0f}</th>{"".join(cells)}</tr>\n')
        maps.append(
            f'<table class="heat"><caption>{escape(row_label(row))}</caption>\n'
            f'<thead><tr><th scope="col">depth (%)</th>{header}</tr></thead>\n'
            f"<tbody>\n{''.join(lines)}</tbody></table>\n"
        )
    return (
        "<figure>\n<figcaption><strong>Needles found (%) by depth and context length.</strong> "
        "Depth 0 % is the start of the context. A red frame marks the training length.</figcaption>\n"
        f'<div class="heats">\n{"".join(maps)}</div>\n'
        f'<p class="files">{_links("figures/needle-depth.svg", "figures/needle-depth.png")}</p>\n</figure>\n'
    )


def _links(*paths: str) -> str:
    return " · ".join(f'<a href="{path}">{path.rsplit(".")[-1].upper()}</a>' for path in paths)


def _analysis(folder: Path) -> str:
    """Figures that are there already, as images inside the page."""
    figures = []
    for stem in sorted({path.with_suffix("") for kind in ("svg", "png") for path in folder.rglob(f"*.{kind}")}):
        svg, png = stem.with_name(f"{stem.name}.svg"), stem.with_name(f"{stem.name}.png")
        image = svg if svg.exists() and not (png.exists() and svg.stat().st_size > LARGEST_SVG) else png
        kind = "svg+xml" if image is svg else "png"
        data = base64.b64encode(image.read_bytes()).decode()
        place = stem.relative_to(folder).as_posix()
        caption = escape(f"{CAPTIONS[stem.name]} ({place})" if stem.name in CAPTIONS else place)
        link = escape(f"{folder.name}/{image.relative_to(folder).as_posix()}")
        figures.append(
            f'<figure><a href="{link}"><img src="data:image/{kind};base64,{data}" alt="{caption}"></a>'
            f"<figcaption>{caption}</figcaption></figure>\n"
        )
    return "".join(figures)


def _settings(settings: Mapping[str, Any]) -> str:
    lines = [
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>\n' for name, value in _flat(settings)
    ]
    if not lines:
        return "<p>The summary says nothing about how it was made.</p>\n"
    return (
        '<div class="scroll" role="region" aria-label="Settings" tabindex="0">\n'
        '<table class="settings"><caption>How the numbers were made</caption>\n'
        f"<tbody>\n{''.join(lines)}</tbody></table></div>\n"
    )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Names and values of what is set, those of nested settings as ``outer.inner``."""
    found = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}.")
        elif value is not None:
            found.append(
                (f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            )
    return found


def _title(summary: Summary) -> str:
    keys = lengths_of(summary.loss, summary.train_length)
    rows = len(summary.loss)
    if len(keys) < 2 or rows < 2:
        return "Scale-invariant attention, compared"
    unit = " the training length" if all(key.endswith("x") for key in (keys[0], keys[-1])) else ""
    return f"{rows} kinds of attention at {length_label(keys[0])} to {length_label(keys[-1])}{unit}"


def _luminance(color: str) -> float:
    """Relative, 0 – 1."""
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (x / 255 for x in _rgb(color))]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def _asset(name: str) -> str:
    return resources.files("scaleinv.reports").joinpath(name).read_text(encoding="utf-8")
