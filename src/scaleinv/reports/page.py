"""The pieces of a report page, as HTML."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterable, Mapping
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from scaleinv.lengths import label as length_label
from scaleinv.lengths import multiple
from scaleinv.plots.chart import Chart
from scaleinv.plots.needle import COLORS, HeatMap
from scaleinv.plots.tables import METHOD, Table, method_label
from scaleinv.reports.colors import on_dark
from scaleinv.version import VERSION

BEST = ". Best in bold."

CAPTIONS = {
    "figure1-gaussian": "Figure 1, top: entropy and share of recent tokens against context length, Gaussian scores.",
    "figure1-model": "Figure 1, bottom: entropy and share of recent tokens against context length, trained models.",
    "figure2": "Figure 2: expected entropy inside [t, tΔ), scale-invariant logits.",
    "figure6": "Figure 6: expected entropy inside [t, tΔ), plain logits.",
    "ranges": "Attention by range of distances, in a trained model.",
    "qq-rotary": "Figures 9 – 14: quantiles of a model's scores against a Gaussian's, with the rotary embedding.",
    "qq-no-rotary": "Figures 9 – 14: quantiles of a model's scores against a Gaussian's, without the rotary embedding.",
}
"""Captions of the analysis's figures; others are captioned with their names."""

LARGEST_SVG = 500_000
"""Bytes; if an SVG is larger, its PNG is shown instead, if there is one."""


@dataclasses.dataclass(frozen=True)
class Section:
    name: str
    title: str
    body: str


def render(title: str, headline: str, sections: Iterable[Section], charts: Iterable[Chart]) -> str:
    """The whole page."""
    sections = list(sections)
    data = json.dumps({chart.name: _chart_data(chart) for chart in charts}, ensure_ascii=False)
    return Template(_asset("page.html")).substitute(
        title=escape(title),
        headline=escape(headline),
        style=_asset("page.css"),
        script=_asset("page.js"),
        links="".join(f'<a href="#{section.name}">{escape(section.title)}</a>\n' for section in sections),
        sections="".join(_section(section) for section in sections),
        data=data.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e"),
        version=escape(VERSION),
    )


def _section(section: Section) -> str:
    return (
        f'<section id="{section.name}" aria-labelledby="{section.name}-title">\n'
        f'<h2 id="{section.name}-title">{escape(section.title)}</h2>\n{section.body}</section>\n'
    )


def beside(ours: Table, paper: Table) -> str:
    """Our table and the paper's, side by side if there is room."""
    return f'<div class="pair">\n{table(ours, BEST)}{table(paper)}</div>\n'


def details(summary: str, body: str) -> str:
    """A part that opens on a click."""
    return f"<details><summary>{escape(summary)}</summary>\n{body}</details>\n"


def table(shown: Table, note: str = ".") -> str:
    """A table whose headers sort it; the script reads ``data-value``."""
    corner = "method" if shown.kind == "method" else "τ"
    header = "".join(
        f'<th scope="col"><button type="button">{escape(column)}</button></th>' for column in (corner, *shown.columns)
    )
    lines = []
    for name, cells in shown.rows.items():
        chosen = ' class="method"' if name == METHOD else ""
        line = [f'<tr{chosen}><th scope="row">{escape(method_label(name))}</th>']
        for cell in cells:
            value = "" if cell.value is None else f' data-value="{cell.value:.9g}"'
            kind = ' class="noise" title="within noise"' if cell.noise else ""
            number, _, spread = cell.text.partition(" ")
            text = f'{escape(number)}<span class="spread"> {escape(spread)}</span>' if spread else escape(number)
            line.append(f"<td{value}{kind}>{f'<strong>{text}</strong>' if cell.best else text}</td>")
        lines.append("".join(line) + "</tr>\n")
    caption = escape(shown.caption)
    return (
        f'<div class="scroll" role="region" aria-label="{caption}" tabindex="0">\n'
        f'<table class="sortable" id="table-{shown.name}"><caption><span>{caption}{note}</span></caption>\n'
        f"<thead><tr>{header}</tr></thead>\n<tbody>\n{''.join(lines)}</tbody></table></div>\n"
    )


def figure(chart: Chart | None) -> str:
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


def heat(shown: HeatMap, train_length: int | None) -> str:
    """One table per method, its cells coloured by the share of needles found, as in `scaleinv.plots.needle`."""
    import matplotlib
    from matplotlib.colors import to_hex

    colors = matplotlib.colormaps[COLORS]
    trained = {key: ' class="trained"' for key in shown.lengths if multiple(key, train_length) == 1}
    header = "".join(f'<th scope="col">{escape(length_label(key))}</th>' for key in shown.lengths)
    maps = []
    for name, depths in shown.methods.items():
        lines = []
        for (start, end), at in depths.items():
            cells = []
            for key in shown.lengths:
                ink, style, title, text = "", "", "", "–"
                if key in at:
                    ink = "#000" if at[key].value > 0.55 else "#FFF"
                    style = f' style="background:{to_hex(colors(at[key].value))};color:{ink}"'
                    title, text = f' title="{escape(at[key].text)}"', f"{100 * at[key].value:.0f}"
                cells.append(f"<td{trained.get(key, '')}{style}{title}>{text}</td>")
            lines.append(f'<tr><th scope="row">{100 * start:.0f}–{100 * end:.0f}</th>{"".join(cells)}</tr>\n')
        maps.append(
            f'<table class="heat"><caption>{escape(method_label(name))}</caption>\n'
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


def analysis(folder: Path) -> str:
    """Existing figures, as images inside the page."""
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


def settings_table(settings: Mapping[str, Any]) -> str:
    """How the numbers were made; settings of needles have a separate column, marked if they differ."""
    losses, needles = both_settings(settings)
    if not losses and not needles:
        return "<p>The summary says nothing about how it was made.</p>\n"
    lines = []
    for name in dict.fromkeys([*losses, *needles]):
        cells = [losses.get(name, "–"), needles.get(name, "–")][: 2 if needles else 1]
        differs = ' class="differs"' if name in differing(settings) else ""
        line = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr{differs}><th scope="row">{escape(name)}</th>{line}</tr>\n')
    head = '<thead><tr><th></th><th scope="col">losses</th><th scope="col">needles</th></tr></thead>\n'
    return (
        '<div class="scroll" role="region" aria-label="Settings" tabindex="0">\n'
        '<table class="settings"><caption>How the numbers were made</caption>\n'
        f"{head if needles else ''}<tbody>\n{''.join(lines)}</tbody></table></div>\n"
    )


def needle_note(settings: Mapping[str, Any]) -> str:
    """A paragraph: how the needles were measured, and which settings differ from those of the losses."""
    losses, needles = both_settings(settings)
    sentences = []
    if "training.steps" in needles:
        steps = needles["training.steps"]
        sentences.append(f"Each model was first fine-tuned on needles for {steps} steps; the losses are without that.")
    if different := differing(settings):
        listed = "; ".join(f"{name} {needles[name]} (losses: {losses[name]})" for name in different)
        sentences.append(f"Settings that differ from those of the losses: {listed}.")
    return f'<p class="note">{escape(" ".join(sentences))}</p>\n' if sentences else ""


def both_settings(settings: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """The settings of the losses and of the needles by name. Needles name their base's settings alike."""
    found = settings.get("needle")
    needles = dict(_flat(found)) if isinstance(found, Mapping) else {}
    losses = dict(_flat({name: value for name, value in settings.items() if name != "needle"}))
    return losses, {name.removeprefix("base."): value for name, value in needles.items()}


def differing(settings: Mapping[str, Any]) -> list[str]:
    """Names of the settings that losses and needles both have, with different values."""
    losses, needles = both_settings(settings)
    return [name for name in losses if name in needles and needles[name] != losses[name]]


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


def _asset(name: str) -> str:
    return resources.files("scaleinv.reports").joinpath(name).read_text(encoding="utf-8")
