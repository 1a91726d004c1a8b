"""The charts of a comparison."""

from pathlib import Path

import pytest

from results_folder import EXTRA, LOSSES, TRAIN_LENGTH, make_results
from scaleinv.analysis.paired import read_evaluations, seed_losses
from scaleinv.eval.summary import parse_summary, read_summary
from scaleinv.plots import compare
from scaleinv.plots.chart import draw
from scaleinv.plots.units import Unit

pytest.importorskip("matplotlib")

BYTES = Unit("byte", 1.0)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_results(tmp_path_factory.mktemp("results"))


def test_static_chart_says_what_it_shows(results: Path) -> None:
    summary = read_summary(results / "summary.json")
    chart = compare.loss_by_length(summary.loss, 512, BYTES, seed_losses(read_evaluations(results / "evaluations")))
    assert chart is not None
    figure = draw(chart)
    axis, _ = figure.axes
    assert axis.get_xlabel() == "context length (1× = 512 tokens)"
    assert axis.get_ylabel() == "loss (nats per byte)"
    assert [label.get_text() for label in axis.get_xticklabels()] == ["1×", "4×", "16×"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][-3:] == [
        "Scale-invariant + p-RoPE",
        EXTRA,
        "training length",
    ]
    curves = {line.get_label(): line for line in axis.lines}
    assert curves["Scale-invariant + p-RoPE"].get_color() == "#000000"
    assert list(curves["RoPE"].get_ydata()) == list(LOSSES["rope"])


def test_training_curves_are_means_over_seeds_without_the_sweep(results: Path) -> None:
    chart = compare.training(compare.read_curves(results / "curves"), {"train_length": TRAIN_LENGTH}, BYTES)
    assert chart is not None
    titles = ["training", "validation at 1× (512)", "validation at 4× (2k)", "validation at 16× (8k)"]
    assert [panel.title for panel in chart.panels] == titles
    assert [series.look.label for series in chart.panels[0].series] == [
        "RoPE", "LogN + p-RoPE", "ALiBi", "Scale-invariant + p-RoPE"
    ]  # fmt: skip
    assert all(len(panel.series[0].points) <= 150 for panel in chart.panels)
    last = chart.panels[3].series[0].points[-1]
    assert (last.x, last.label) == (600, "step 600")
    assert last.y == pytest.approx(2.198, abs=1e-3)


def test_positions_are_means_over_seeds(results: Path) -> None:
    chart = compare.by_position(read_evaluations(results / "evaluations"), TRAIN_LENGTH, BYTES)
    assert chart is not None
    point = chart.panels[0].series[0].points[-1]
    assert point.label == "positions 256–511"
    assert point.y == pytest.approx(1.145 + 3 / 512 + 0.001)
    assert [panel.mark for panel in chart.panels] == [512] * 3


def test_close_methods_have_a_panel_of_their_own(results: Path) -> None:
    losses = read_summary(results / "summary.json").loss
    chart = compare.loss_by_length(losses, 512, BYTES)
    assert chart is not None
    assert [(panel.title, panel.zoomed) for panel in chart.panels] == [
        ("all methods", False),
        ("the lower half, magnified", True),
    ]
    whole, close = (axis.get_ylim() for axis in draw(chart).axes)
    values = sorted(loss.value for by_length in losses.values() for loss in by_length.values())
    inside = [value for value in values if close[0] <= value <= close[1]]
    assert inside == values[: len(inside)]
    assert len(values) / 2 <= len(inside) < 0.7 * len(values)
    assert (whole[1] - whole[0]) / (close[1] - close[0]) > compare.MAGNIFIED

    even = parse_summary({"loss": {"rope": {"1x": {"mean": 1.0}}, "alibi": {"1x": {"mean": 2.0}}}}, "summary")
    chart = compare.loss_by_length(even.loss, 512, BYTES)
    assert chart is not None
    assert len(chart.panels) == 1


def test_single_seeds_are_dots(results: Path) -> None:
    losses = read_summary(results / "summary.json").loss
    seeds = seed_losses(read_evaluations(results / "evaluations"))
    chart = compare.loss_by_length(losses, 512, BYTES, seeds)
    assert chart is not None
    assert "Small dots are single seeds" in chart.caption
    points = {series.look.label: series.points for series in chart.panels[0].series}
    assert points["RoPE"][0].seeds == pytest.approx((1.145, 1.153))
    assert len(draw(chart).axes[0].collections) == 2 * len(LOSSES)  # bars and dots
    assert compare.loss_by_length(losses, 512, BYTES).panels[0].series[0].points[0].seeds == ()  # type: ignore[union-attr]


def test_training_time_comes_from_the_rates() -> None:
    lines = [{"step": step, "loss": 1.0, "tokens_per_second": 0.0 if step < 2 else 100.0} for step in range(10)]
    assert compare.Curve("rope", 0, tuple(lines)).seconds(200) == pytest.approx(20)
    assert compare.Curve("rope", 0, ({"step": 0, "loss": 1.0},)).seconds(200) is None
    assert compare.Curve("rope", 0, ()).seconds(200) is None


@pytest.mark.parametrize("distill", [False, True])
def test_the_caption_of_an_adaptation_has_no_validation_panels(distill: bool) -> None:
    curves = {Path("a"): compare.Curve("stock", 0, ({"step": 1, "loss": 1.0}, {"step": 2, "loss": None}))}
    chart = compare.training(curves, {"train_length": 512, "distill": distill}, BYTES)
    assert chart is not None
    assert "validation" not in chart.caption
    assert ("cannot be compared" in chart.caption) == distill


@pytest.mark.parametrize(
    ("during", "after", "words"),
    [
        (65_536, 262_144, "the first 65,536 held-out tokens and the table 262,144: other text"),
        (65_536, 65_536, "and the table both use the first 65,536 held-out tokens"),
        (None, None, "the first few held-out tokens and the table more"),
    ],
)
def test_the_caption_says_which_tokens(results: Path, during: int | None, after: int | None, words: str) -> None:
    settings = {"train_length": 512, "training_validation_tokens": during, "validation_tokens": after}
    chart = compare.training(compare.read_curves(results / "curves"), settings, BYTES)
    assert chart is not None
    assert words in chart.caption
