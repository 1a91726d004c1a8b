"""The report: numbers arrive in tables, figures and page; missing parts are left out, malformed ones named."""

import csv
import html.parser
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from scaleinv.eval.summary import parse_summary, read_summary
from scaleinv.plots import compare, tables
from scaleinv.reports import comparison as report

pytest.importorskip("matplotlib")

TRAIN_LENGTH = 512
EXTRA = """a<b> & "c" 'd'"""
"""A row that nobody knows, of characters that HTML minds."""

# Loss at 1x, 4x and 16x; how much a seed adds; needle accuracy.
ROWS = {
    "rope": (1.145, 1.384, 2.198),
    "rope+ntk": (1.145, 1.306, 2.183),
    "logn+p-rope": (1.162, 1.188, 1.254),
    "alibi": (1.257, 1.248, 1.246),
    "scale-invariant-p-rope": (1.146, 1.141, 1.141),
    EXTRA: (1.4, 1.5, 1.6),
}
NEEDLE = {"rope": (0.95, 0.1, 0.0), "alibi": (0.93, 0.2, 0.0), "scale-invariant-p-rope": (0.96, 0.97, 0.955)}
KEYS = ("1x", "4x", "16x")


def write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")


def make_results(folder: Path) -> Path:
    """A results folder with everything in it, as `scaleinv compare` and `scaleinv needle` write them."""
    loss = {
        row: {key: {"mean": mean, "stderr": 0.004, "seeds": 2} for key, mean in zip(KEYS, means, strict=True)}
        for row, means in ROWS.items()
    }
    found = {
        row: {
            key: {"accuracy": p, "low": max(p - 0.05, 0), "high": min(p + 0.03, 1), "samples": 64}
            for key, p in zip(KEYS, values, strict=True)
        }
        for row, values in NEEDLE.items()
    }
    settings = {
        "train_length": TRAIN_LENGTH,
        "preset": "mini",
        "data": "sotu",
        "command": "scaleinv compare --preset mini --out '<results>'",
        "versions": {"torch": "2.13", "scaleinv": "0.1"},
        "corpus_sha256": None,
    }
    write(folder / "summary.json", {"loss": loss, "needle": found, "settings": settings})
    for seed in (0, 1):
        for number, (row, means) in enumerate(ROWS.items()):
            lengths = {}
            for key, mean in zip(KEYS, means, strict=True):
                length = TRAIN_LENGTH * int(key[:-1])
                edges = [0, *(2**k for k in range(length.bit_length()))]
                drift = (means[2] - means[0]) / 2
                positions = [
                    (low, high, means[0] + 3 / high + drift * max(0, math.log2(high / TRAIN_LENGTH)) + 0.002 * seed)
                    for low, high in itertools.pairwise(edges)
                ]
                at = {"length": length, "mean": mean, "stderr": 0.01, "windows": 8, "positions": positions}
                lengths[key] = at
            name = f"row{number}" if row == EXTRA else row
            data = {"row": row, "seed": seed, "model": row, "train_length": TRAIN_LENGTH, "lengths": lengths}
            write(folder / "evaluations" / f"{name}-seed{seed}.json", data)
            if row in (EXTRA, "rope+ntk"):
                continue
            lines = []
            for step in range(0, 601, 2):
                line: dict[str, Any] = {
                    "step": step,
                    "loss": means[0] + 4 * math.exp(-step / 60) + 0.05 * math.sin(step),
                }
                if step % 50 == 0:
                    late = {key: mean + 4 * math.exp(-step / 60) for key, mean in zip(KEYS, means, strict=True)}
                    line["validation"] = late
                lines.append(json.dumps(line) + "\n")
            write(folder / "curves" / f"{row}-seed{seed}.jsonl", "".join(lines) + '{"step": 60')
    write(folder / "curves" / "scale-invariant-p-rope-tau0.1-seed0.jsonl", '{"step": 0, "loss": 9.0}\n')
    sweep = {
        tau: {key: {"mean": 1.14 + 0.02 * abs(math.log10(float(tau)) - 1) * i, "stderr": 0.003, "seeds": 2}
              for i, key in enumerate(KEYS)}
        for tau in ("100", "0.01", "10", "0.1", "1")
    }  # fmt: skip
    write(folder / "sweep.json", {"tau": sweep})
    for row, values in NEEDLE.items():
        lengths = {}
        for key, p in zip(KEYS, values, strict=True):
            depths = [
                {"from": i / 5, "to": (i + 1) / 5, "needles": 40,
                 "accuracy": min(1.0, p * (0.8 + 0.05 * i)), "low": 0.0, "high": 1.0}
                for i in range(5)
            ]  # fmt: skip
            at = {**found[row][key], "length": TRAIN_LENGTH * int(key[:-1]), "depths": depths}
            lengths[key] = at
        write(folder / "needle" / f"{row}.json", {"row": row, "seed": 0, "settings": {}, "lengths": lengths})
    write(folder / "analysis" / "figure2.svg", '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"/>')
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_results(tmp_path_factory.mktemp("results"))
    assert report.write_report(folder) == folder / "report.html"
    return folder


class Page(html.parser.HTMLParser):
    """Checks that tags nest, that ids are unique and that nothing is fetched; collects text."""

    VOID = frozenset({"meta", "img", "br", "link", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            assert not name.startswith("on")
            if name == "id":
                self.ids.append(value or "")
            if name == "src":
                assert (value or "").startswith("data:")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


def test_page_holds_every_part(results: Path) -> None:
    source = (results / "report.html").read_text(encoding="utf-8")
    page = Page(source)
    assert {"loss", "length", "position", "training", "needle", "sweep", "analysis", "settings"} <= set(page.ids)
    assert "1.141 ± 0.004" in page.text
    assert "paper, 162 M parameters, 4k training length" in page.text
    assert "3.247" in page.text  # the paper's loss at 16x
    assert "scaleinv compare --preset mini --out '<results>'" in page.text
    assert "versions.torch" in page.text
    assert "nothing for" not in page.text
    assert EXTRA in page.text
    assert "<b>" not in source
    assert set(re.findall(r"https?://[^\s\"')<]+", source)) == {
        "https://arxiv.org/abs/2505.17083",
        "http://www.w3.org/2000/svg",
    }
    charts = json.loads(re.search(r'id="charts">(.*?)</script>', source, re.S)[1])  # type: ignore[index]
    assert list(charts) == ["loss-by-length", "loss-by-position", "training", "needle-by-length", "tau-sweep"]


def test_headline_is_computed(results: Path) -> None:
    text = report.headline(read_summary(results / "summary.json"))
    assert "From a context of 1× (512) to 16× (8k) tokens" in text
    assert "−0.005 with Scale-invariant + p-RoPE" in text
    assert "+1.053 with RoPE" in text
    assert "6 methods in the table" in text
    assert "lowest loss at 16× is 1.141, with Scale-invariant + p-RoPE; next is ALiBi, 1.246" in text


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ({}, "No losses were measured."),
        ({"rope": {"1x": {"mean": None}}}, "Every run diverged."),
        ({"rope": {"1x": {"mean": 2.0}}}, "The lowest loss at 1× is 2.000, with RoPE."),
    ],
)
def test_headline_of_little(loss: dict[str, Any], expected: str) -> None:
    assert report.headline(parse_summary({"loss": loss}, "summary")) == expected


def test_tables(results: Path) -> None:
    lines = (results / "tables" / "loss.md").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "Validation loss (nats per token), mean ± standard error, 2 seeds"
    assert lines[2] == "| row | 1× (512) | 4× (2k) | 16× (8k) | 1× → 16× |"
    assert "| rope | **1.145 ± 0.004** | 1.384 ± 0.004 | 2.198 ± 0.004 | +1.053 |" in lines
    assert "| scale-invariant-p-rope | 1.146 ± 0.004 | **1.141 ± 0.004** | **1.141 ± 0.004** | −0.005 |" in lines
    with (results / "tables" / "loss.csv").open(newline="", encoding="utf-8") as file:
        records = list(csv.DictReader(file))
    assert len(records) == len(ROWS) * len(KEYS)
    assert records[0] == {
        "row": "rope",
        "length": "1x",
        "multiple": "1.0",
        "mean": "1.145",
        "stderr": "0.004",
        "seeds": "2",
    }
    assert json.loads((results / "tables" / "loss.json").read_text(encoding="utf-8"))["records"][2]["mean"] == 2.198
    assert "| **0.970 (0.92–1.00)** |" in (results / "tables" / "needle.md").read_text(encoding="utf-8")
    sweep = (results / "tables" / "tau-sweep.md").read_text(encoding="utf-8").splitlines()
    assert [line.split(" | ")[0] for line in sweep[4:]] == ["| 0.01", "| 0.1", "| 1", "| 10", "| 100"]
    assert (results / "tables" / "tau-sweep.csv").read_text(encoding="utf-8").startswith("tau,length,multiple,mean")


def test_rows_that_read_the_same_are_both_best_and_no_needle_found_is_not() -> None:
    loss = {"rope": {"1x": {"mean": 1.00001}}, "alibi": {"1x": {"mean": 1.00004}}, "nope": {"1x": {"mean": 1.1}}}
    needle = {"rope": {"1x": {"accuracy": 0.0}}, "alibi": {"1x": {"accuracy": 0.0}}}
    summary = parse_summary({"loss": loss, "needle": needle}, "summary")
    best = {row: cells[0].best for row, cells in tables.loss_table(summary).rows.items()}
    assert best == {"rope": True, "alibi": True, "nope": False}
    assert not any(cells[0].best for cells in tables.needle_table(summary).rows.values())


def test_lengths_in_tokens_are_ordered_among_multiples() -> None:
    loss = {"rope": {"4x": {"mean": 1.0}, "1000": {"mean": 1.0}, "1x": {"mean": 1.0}}}
    summary = parse_summary({"loss": loss, "settings": {"train_length": 512}}, "summary")
    assert tables.loss_table(summary).columns == ("1× (512)", "1,000 tokens", "4× (2k)", "1× → 4×")


def test_paper_numbers_are_complete() -> None:
    loss = tables.paper_table("paper-loss", "Loss", tables.PAPER_LOSS, ())
    assert len(loss.rows) == 12
    assert [cell.best for cell in loss.rows["scale-invariant-p-rope"]] == [True] * 3
    assert loss.columns == ("1× (4k)", "4× (16k)", "16× (64k)")
    few = tables.paper_table("paper-needle", "Needle", tables.PAPER_NEEDLE, ("alibi", "infini-rope", EXTRA))
    assert list(few.rows) == ["alibi"]


def test_terminal_table_is_aligned(results: Path) -> None:
    caption, *lines = tables.terminal_table(read_summary(results / "summary.json")).splitlines()
    assert caption.startswith("Validation loss")
    assert lines[0].split() == ["1×", "(512)", "4×", "(2k)", "16×", "(8k)", "1×", "→", "16×"]
    assert len({line.index(" ± ", 40) for line in lines[1:]}) == 1
    assert lines[1].startswith("rope ")
    assert "1.145 ± 0.004*" in lines[1]


def test_figures_are_written_for_every_chart(results: Path) -> None:
    names = {"loss-by-length", "loss-by-position", "training", "needle-by-length", "needle-depth", "tau-sweep"}
    assert {path.name for path in (results / "figures").iterdir()} == {
        f"{n}.{kind}" for n in names for kind in ("png", "svg")
    }


def test_static_chart_says_what_it_shows(results: Path) -> None:
    summary = read_summary(results / "summary.json")
    chart = compare.by_length("loss-by-length", "Loss", compare.LOSS, summary.loss, 512)
    assert chart is not None
    figure = compare.draw(chart)
    (axis,) = figure.axes
    assert axis.get_xlabel() == "context length (1× = 512 tokens)"
    assert axis.get_ylabel() == "loss (nats per token)"
    assert [label.get_text() for label in axis.get_xticklabels()] == ["1×", "4×", "16×"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][-3:] == [
        "Scale-invariant + p-RoPE",
        EXTRA,
        "training length",
    ]
    curves = {line.get_label(): line for line in axis.lines}
    assert curves["Scale-invariant + p-RoPE"].get_color() == "#000000"
    assert list(curves["RoPE"].get_ydata()) == list(ROWS["rope"])


def test_training_curves_are_means_over_seeds_without_the_sweep(results: Path) -> None:
    chart = compare.training(results / "curves", TRAIN_LENGTH)
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
    chart = compare.by_position(results / "evaluations", TRAIN_LENGTH)
    assert chart is not None
    point = chart.panels[0].series[0].points[-1]
    assert point.label == "positions 256–511"
    assert point.y == pytest.approx(1.145 + 3 / 512 + 0.001)
    assert [panel.mark for panel in chart.panels] == [512] * 3


def test_summary_alone_is_enough(tmp_path: Path) -> None:
    loss = {"rope": {"1x": {"mean": 1.5, "stderr": None, "seeds": 1}}, "alibi": {"1x": {"mean": float("nan")}}}
    write(tmp_path / "summary.json", {"loss": loss})
    page = Page(report.write_report(tmp_path).read_text(encoding="utf-8"))
    assert "nothing for: by position, training, needle, τ sweep, analysis." in page.text
    assert "diverged" in page.text
    assert "needle" not in page.ids


def test_progress_names_the_steps(tmp_path: Path) -> None:
    write(tmp_path / "summary.json", {"loss": {"rope": {"1x": {"mean": 1.5}}}})
    said: list[str] = []
    report.write_report(tmp_path, progress=said.append)
    assert said == [f"reading {tmp_path}", "drawing loss-by-length", f"wrote {tmp_path / 'report.html'}"]


MEAN = {"mean": 1.0, "stderr": 0.1, "seeds": 1}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("summary.json", "{", "summary.json is not JSON"),
        ("summary.json", [], "summary.json must be a JSON object"),
        ("summary.json", {"loss": {"rope": {"1x": {"stderr": 0.1}}}}, r"loss\.rope\.1x has no 'mean'"),
        ("summary.json", {"loss": {"rope": {"1x": {"mean": "1"}}}}, "mean must be a number, got '1'"),
        ("summary.json", {"loss": {"rope": {"long": MEAN}}}, "summary.json: lengths must read like .* got 'long'"),
        ("summary.json", {"loss": {"rope": {"512": MEAN}}}, "train_length must say what 1x is"),
        ("summary.json", {"needle": {"rope": {"1x": {"accuracy": 2}}}}, "accuracy must be between 0 and 1"),
        ("summary.json", {"settings": {"train_length": "512"}}, "train_length must be a positive number"),
        (
            "evaluations/a-seed0.json",
            {"lengths": {"1x": {"positions": [[0, 1, 1.0]]}}},
            "a-seed0.json must name its row",
        ),
        ("evaluations/a-seed0.json", {"row": "rope", "lengths": {"1x": {"positions": [[0, 1]]}}}, "a-seed0.*positions"),
        ("curves/rope.jsonl", "{}\n", r"rope\.jsonl must be named like"),
        ("curves/rope-seed0.jsonl", '{"step": 1, "loss": 2}\n{\n', "rope-seed0.jsonl line 2 is not JSON"),
        ("sweep.json", {"tau": {"1": {"far": MEAN}}}, "sweep.json: lengths must read like"),
        ("sweep.json", {"tau": {"big": {"1x": MEAN}}}, "tau must be a positive number of tokens, got 'big'"),
        (
            "needle/rope.json",
            {
                "row": "rope",
                "lengths": {"1x": {"length": 1, "accuracy": 1, "depths": [{"from": 9, "to": 10, "accuracy": 1}]}},
            },
            "rope.json: 1x: from and to must be rising fractions",
        ),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, name: str, content: Any, message: str) -> None:
    write(tmp_path / "summary.json", {"loss": {"rope": {"1x": MEAN}}})
    write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message):
        report.write_report(tmp_path)


def test_large_figures_of_the_analysis_are_shown_as_pixels(tmp_path: Path) -> None:
    write(tmp_path / "summary.json", {"loss": {}})
    for name, size in (("small", 10), ("large", report.LARGEST_SVG + 1)):
        write(tmp_path / "analysis" / "model" / f"{name}.svg", "<" * size)
        write(tmp_path / "analysis" / "model" / f"{name}.png", "pixels")
    source = report.write_report(tmp_path).read_text(encoding="utf-8")
    assert re.findall(r"data:image/(\S+);base64", source) == ["png", "svg+xml"]
    assert "<figcaption>model/large</figcaption>" in source


def test_missing_summary_says_what_writes_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"summary.json is missing; `scaleinv compare` writes it"):
        report.write_report(tmp_path)


def test_colours_can_be_read_on_dark_pages() -> None:
    from scaleinv.plots import style

    assert report.on_dark("#000000") == "#F5F5F5"
    for look in style.METHODS.values():
        assert report.contrast(report.on_dark(look.color), report.DARK_PAGE) >= 3
