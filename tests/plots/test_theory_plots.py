"""Figures 1 (top), 2 and 6: every axis says what it shows, and the files are there."""

from pathlib import Path

import pytest

from scaleinv.analysis import context_figure, growth_figure
from scaleinv.logits import ScaleInvariant
from scaleinv.plots import theory

pytest.importorskip("matplotlib")


def test_context_figure(tmp_path: Path) -> None:
    data = context_figure(lengths=(128, 1024, 8192), samples=20)
    figure = theory.draw_context(data)
    assert len(figure.axes) == 3
    for axis in figure.axes:
        assert axis.get_xlabel() == "context length N (tokens)"
        assert axis.get_title(loc="left")
        assert len(axis.lines) == 3
        assert len(axis.collections) == 3  # error bands
    assert [axis.get_ylabel() for axis in figure.axes] == ["entropy (nats)", "entropy (nats)", "share of attention"]
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["Plain", "LogN", "Scale-invariant"]
    assert list(figure.axes[0].lines[2].get_ydata()) == [
        p.entropy for p in data.points if p.method == "scale-invariant"
    ]
    png, svg = theory.save_context(data, tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()


def test_growth_figure(tmp_path: Path) -> None:
    data = growth_figure("figure2", "scale-invariant", ScaleInvariant(), longest=2**14, samples=20)
    figure = theory.draw_growth(data)
    assert [axis.get_xlabel() for axis in figure.axes] == ["log t, t in tokens", "√log t, t in tokens"]
    for axis in figure.axes:
        assert "nats" in axis.get_ylabel()
        legend = axis.get_legend()
        assert legend is not None
        texts = [text.get_text() for text in legend.get_texts()]
        assert len(texts) == 3
        assert all("R²" in text and "slope" in text for text in texts)
    assert {path.name for path in theory.save_growth(data, tmp_path)} == {"figure2.png", "figure2.svg"}
