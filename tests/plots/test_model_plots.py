"""Figures from inside a model: every axis says what it shows, and the files are there."""

import dataclasses
from pathlib import Path

import pytest
import torch

from scaleinv.analysis.model import LengthStatistics, ModelStatistics
from scaleinv.analysis.scores import NORMAL, Scores, ScoreStatistics
from scaleinv.plots import model as plots
from scaleinv.plots import style

pytest.importorskip("matplotlib")


def statistics(name: str, lengths: tuple[int, ...] = (512, 2048), layers: int = 3) -> ModelStatistics:
    generator = torch.Generator().manual_seed(0)
    entries = []
    for length in lengths:
        ranges = ((0, 1), (1, 10), (10, 100), (100, min(length, 1000)), *([(1000, length)] if length > 1000 else []))
        share = torch.rand(layers, 4, len(ranges), generator=generator).double()
        heads = torch.rand(layers, 4, generator=generator).double()
        far = torch.where(heads > 0.9, torch.nan, heads)
        share = share / share.sum(-1, keepdim=True)
        entries.append(LengthStatistics(length, 1, 64, heads, far, heads, heads, ranges, share, share))
    return ModelStatistics(name, tuple(range(layers)), tuple(entries), 10, 100)


def scores(layers: int) -> ScoreStatistics:
    moments = [torch.ones(layers, 2).double() for _ in range(4)]
    quantiles = torch.tensor(NORMAL).double().expand(layers, 2, -1)
    found = Scores(*moments, quantiles)
    return ScoreStatistics("rope", 64, 1, 10, tuple(range(layers)), found, found, NORMAL, ())


def test_models(tmp_path: Path) -> None:
    figure = plots.draw_models([statistics("rope"), statistics("scale-invariant-p-rope"), statistics("some/llama")])
    assert [axis.get_ylabel() for axis in figure.axes] == ["entropy (nats)", "entropy (nats)", "share of attention"]
    for axis in figure.axes:
        assert axis.get_xlabel() == "context length N (tokens)"
        assert [tick.get_text() for tick in axis.get_xticklabels()] == ["512", "2k"]
        assert [line.get_color() for line in axis.lines] == [
            style.look("rope").color,
            style.look("scale-invariant-p-rope").color,
            plots.OTHERS[0],
        ]
        assert all(torch.tensor(line.get_ydata()).isfinite().all() for line in axis.lines)
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["RoPE", "Scale-invariant + p-RoPE", "some/llama"]
    assert {path.name for path in plots.save_models([statistics("rope")], tmp_path)} == {
        "figure1-model.png",
        "figure1-model.svg",
    }
    with pytest.raises(ValueError, match="models must hold at least one"):
        plots.draw_models([])


def test_ranges(tmp_path: Path) -> None:
    figure = plots.draw_ranges(statistics("rope"))
    left, right = figure.axes
    assert [tick.get_text() for tick in left.get_xticklabels()] == ["512", "2k"]
    assert [tick.get_text() for tick in right.get_xticklabels()] == ["0", "1", "2"]
    tops = [bar.get_y() + bar.get_height() for bar in left.patches[-2:]]
    assert tops == pytest.approx([1, 1])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["1,000 …", "100 – 999", "10 – 99", "1 – 9", "the token itself"]
    assert all(path.stat().st_size for path in plots.save_ranges(statistics("rope"), tmp_path))


@pytest.mark.parametrize("layers", [1, 4, 8])
def test_qq(layers: int) -> None:
    figure = plots.draw_qq(scores(layers))
    shown = [axis for axis in figure.axes if axis.get_visible()]
    assert [axis.get_title(loc="left") for axis in shown] == [f"layer {n}, variance 1" for n in range(layers)]
    assert all(len(axis.lines) == 3 for axis in shown)  # two heads and the diagonal
    assert list(shown[0].lines[-1].get_xdata()) == list(shown[0].lines[-1].get_ydata()) == list(NORMAL)


def test_qq_without_the_rotary_only_where_there_is_such_a_thing(tmp_path: Path) -> None:
    assert len(plots.save_qq(scores(2), tmp_path)) == 4
    hidden = dataclasses.replace(scores(2), without_rotary=None)
    assert len(plots.save_qq(hidden, tmp_path)) == 2
    with pytest.raises(ValueError, match="rotary=False is not available"):
        plots.draw_qq(hidden, rotary=False)
