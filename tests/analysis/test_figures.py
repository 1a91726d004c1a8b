"""The numbers of the figures and the report."""

import csv
import json
import math
from pathlib import Path

import pytest

from scaleinv.analysis import check_definitions, context_figure, growth_figure
from scaleinv.logits import LogN, Plain, ScaleInvariant


def test_context_figure_shows_the_point(tmp_path: Path) -> None:
    data = context_figure(lengths=(256, 4096, 65_536), samples=300)
    points = {(point.method, point.length): point for point in data.points}
    for length in (256, 4096, 65_536):
        # Exchangeable logits: the expected share is exactly 100/N. LogN shows it only while a win is not too rare.
        for method in ("plain", "logn") if length < 10_000 else ("plain",):
            point = points[method, length]
            assert abs(point.recent_share - 100 / length) < 5 * point.recent_share_error
        assert points["plain", length].entropy == pytest.approx(math.log(length) - 0.5, abs=0.02)
    assert points["scale-invariant", 65_536].recent_share > 0.2
    assert points["scale-invariant", 65_536].entropy < 6
    with (data.save(tmp_path)[0]).open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9
    assert float(rows[0]["entropy"]) == points["plain", 256].entropy


def test_growth_figures(tmp_path: Path) -> None:
    figure = growth_figure("figure6", "plain", Plain(), longest=2**15, samples=50)
    for curve in figure.curves:
        assert curve.log_fit.slope == pytest.approx(1, abs=0.02)
        assert curve.log_fit.r2 > 0.999 > curve.sqrt_fit.r2
    table, document = figure.save(tmp_path / "deep" / "folder")
    assert table.name == "figure6.csv"
    saved = json.loads(document.read_text())
    assert saved["curves"][0]["log_fit"]["slope"] == figure.curves[0].log_fit.slope


def test_what_json_cannot_hold_becomes_null(tmp_path: Path) -> None:
    definitions = check_definitions({"hot": LogN(heads=1, scale=5.0)}, longest=2**15, samples=10)
    text = definitions.save(tmp_path)[1].read_text()
    assert "Infinity" not in text
    assert "NaN" not in text
    json.loads(text)


def test_lengths_must_exceed_recent() -> None:
    with pytest.raises(ValueError, match="lengths must exceed recent=100"):
        context_figure(lengths=(64,), transforms={"x": ScaleInvariant()})
