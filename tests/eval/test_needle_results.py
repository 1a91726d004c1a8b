"""The numbers of the needle test: intervals, counts by depth, seeds pooled, heat maps."""

import math

import numpy as np
import pytest

from scaleinv.eval.needle_results import pooled, summarize, wilson


@pytest.mark.parametrize(("right", "total"), [(0, 1), (1, 1), (0, 50), (50, 50), (9, 10), (123, 400), (3, 7)])
def test_wilson_against_scipy(right, total):
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(right, total).proportion_ci(method="wilson")
    assert wilson(right, total) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize("right", range(1, 10))
def test_wilson_solves_its_equation(right):
    """Its ends are the shares p with |right/n - p| = z √(p (1 - p) / n)."""
    for end in wilson(right, 10):
        assert abs(right / 10 - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / 10), rel=1e-6)


def test_wilson_refuses_nonsense():
    for right, total in ((1, 0), (-1, 3), (4, 3)):
        with pytest.raises(ValueError, match="right"):
            wilson(right, total)


def record(depths, correct, tokens_right=5, loss=0.5, tokens=10, index=0):
    return {
        "length": 96, "index": index, "depths": depths, "correct": correct,
        "tokens": tokens, "tokens_right": tokens_right, "loss": loss,
    }  # fmt: skip


def test_summarize_counts_needles_and_weighs_tokens():
    result = summarize([record([0.0, 1.0], [True, False]), record([0.05, 0.99], [True, True], 30, 1.0, 30)])
    assert result["accuracy"] == 0.75
    assert (result["low"], result["high"]) == wilson(3, 4)
    assert result["samples"] == 2
    assert result["token_accuracy"] == 35 / 40
    assert result["answer_loss"] == pytest.approx((10 * 0.5 + 30 * 1.0) / 40)
    assert [(b["from"], b["to"], b["accuracy"], b["needles"]) for b in result["depths"]] == [
        (0.0, 0.1, 1.0, 2),
        (0.9, 1.0, 0.5, 2),
    ]


def test_seeds_are_pooled_by_counting_needles():
    first = summarize([record([0.05, 0.5], [True, False]), record([0.07, 0.95], [True, True])])
    second = summarize([record([0.01, 0.52], [False, False])])
    results = [
        {"row": "rope", "seed": seed, "settings": {"a": 1}, "lengths": {"1x": at}}
        for seed, at in ((0, first), (7, second))
    ]
    results[0]["lengths"]["4x"] = first
    found = pooled(results)
    assert (found["row"], found["settings"]) == ("rope", {"a": 1})
    at = found["lengths"]["1x"]
    assert (at["accuracy"], at["low"], at["high"]) == (3 / 6, *wilson(3, 6))
    assert (at["samples"], at["seeds"]) == (3, {"0": 0.75, "7": 0.0})
    assert [(b["from"], b["accuracy"], b["needles"]) for b in at["depths"]] == [
        (0.0, 2 / 3, 3),
        (0.5, 0.0, 2),
        (0.9, 1.0, 1),
    ]
    assert found["lengths"]["4x"]["seeds"] == {"0": 0.75}


@pytest.mark.slow
def test_heatmaps(tmp_path):
    pytest.importorskip("matplotlib")
    from scaleinv.plots.needle import draw_heatmaps, save_heatmaps

    random = np.random.default_rng(0)

    def result(row, depths):
        records = [[record([d], [bool(random.random() < 0.7)]) for d in depths] for _ in range(2)]
        lengths = {
            label: summarize(r) | {"length": n} for label, n, r in zip(("1x", "4x"), (96, 384), records, strict=True)
        }
        return {"row": row, "settings": {"train_length": 96}, "lengths": lengths}

    rows = [result("rope", random.random(200)), result("scale-invariant-p-rope", [0.5] * 9)]
    figure = draw_heatmaps(rows)
    first, second, bar = figure.axes
    assert first.images[0].get_array().shape == (11, 2)
    assert second.images[0].get_array().shape == (2, 2)  # one depth, and all
    assert "%" in bar.get_ylabel()
    assert "%" in first.get_ylabel()
    assert "tokens" in first.get_xlabel()
    texts = [text.get_text() for text in first.texts]
    assert texts[0] == f"{100 * rows[0]['lengths']['1x']['accuracy']:.0f}"
    assert texts.count("training length") == 1
    png, svg = save_heatmaps(rows, tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()
    with pytest.raises(ValueError, match="results"):
        draw_heatmaps([])
