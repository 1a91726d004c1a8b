"""The report: numbers arrive in tables, figures and page; missing parts are left out, malformed ones named."""

import html.parser
import json
import re
from pathlib import Path
from typing import Any

import pytest

from results_folder import EXTRA, make_results, write
from scaleinv.eval.summary import parse_summary, read_summary
from scaleinv.reports import comparison as report
from scaleinv.reports import page as pieces

pytest.importorskip("matplotlib")


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
    assert "nats per byte" in page.text
    assert "nats per token" not in page.text
    assert "1.646" in page.text  # 1.141 nats in bits per byte
    assert "852,000" in page.text  # parameters
    assert "5.0" in page.text  # minutes: 301 steps of a second
    assert "nothing for" not in page.text
    assert EXTRA in page.text
    assert "<b>" not in source
    assert set(re.findall(r"https?://[^\s\"')<]+", source)) == {
        "https://arxiv.org/abs/2505.17083",
        "http://www.w3.org/2000/svg",
    }
    charts = charts_of(source)
    assert list(charts) == ["loss-by-length", "loss-by-position", "training", "needle-by-length", "tau-sweep"]


def charts_of(source: str) -> dict[str, Any]:
    return json.loads(re.search(r'id="charts">(.*?)</script>', source, re.S)[1])  # type: ignore[index]


def test_settings_of_needles_are_shown_where_they_differ(results: Path) -> None:
    source = (results / "report.html").read_text(encoding="utf-8")
    text = Page(source).text
    assert "Settings that differ from those of the losses: steps 600 (losses: 400)." in text
    assert "first fine-tuned on needles for 900 steps" in text
    assert re.findall(r'<tr class="differs"><th scope="row">(\w+)</th><td>(\w+)</td><td>(\w+)</td>', source) == [
        ("steps", "400", "600")
    ]
    same = {"train_length": 512, "needle": {"train_length": 512}}
    assert pieces.needle_note(same) == ""
    assert "differs" not in pieces.settings_table(same)
    assert "needles" not in pieces.settings_table({"train_length": 512})


def test_captions_say_which_tokens_are_used(results: Path) -> None:
    charts = charts_of((results / "report.html").read_text(encoding="utf-8"))
    assert "the first 65,536 held-out tokens and the table 262,144" in charts["training"]["caption"]


def test_headline_is_computed(results: Path) -> None:
    text = report.headline(read_summary(results / "summary.json"))
    assert "From a context of 1× (512) to 16× (8k) tokens, the loss in nats per byte changes" in text
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


def test_figures_are_written_for_every_chart(results: Path) -> None:
    names = {"loss-by-length", "loss-by-position", "training", "needle-by-length", "needle-depth", "tau-sweep"}
    assert {path.name for path in (results / "figures").iterdir()} == {
        f"{n}.{kind}" for n in names for kind in ("png", "svg")
    }


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
        ("evaluations/a-seed0.json", "[]", "a-seed0.json must hold a JSON object"),
        ("evaluations/a-seed0.json", '{"row": ', "a-seed0.json is not JSON"),
        ("evaluations/a-seed0.json", {"lengths": {}}, "a-seed0.json is not an evaluation: row cannot be None"),
        ("evaluations/a-seed0.json", {"lengths": {"1x": {}}}, "a-seed0.json is not an evaluation: .*has no 'length'"),
        ("curves/rope.jsonl", "{}\n", r"rope\.jsonl must be named like"),
        ("curves/rope-seed0.jsonl", '{"step": 1, "loss": 2}\n{\n', "rope-seed0.jsonl line 2 is not JSON"),
        ("sweep.json", {"tau": {"1": {"far": MEAN}}}, "sweep.json: lengths must read like"),
        ("sweep.json", {"tau": {"big": {"1x": MEAN}}}, "tau must be a positive number of tokens, got 'big'"),
        (
            "needle/rope-seed0.json",
            {
                "row": "rope",
                "lengths": {"1x": {"length": 1, "accuracy": 1, "depths": [{"from": 9, "to": 10, "accuracy": 1}]}},
            },
            "rope-seed0.json: 1x: from and to must be rising fractions",
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
    for name, size in (("small", 10), ("large", pieces.LARGEST_SVG + 1)):
        write(tmp_path / "analysis" / "model" / f"{name}.svg", "<" * size)
        write(tmp_path / "analysis" / "model" / f"{name}.png", "pixels")
    source = report.write_report(tmp_path).read_text(encoding="utf-8")
    assert re.findall(r"data:image/(\S+);base64", source) == ["png", "svg+xml"]
    assert "<figcaption>model/large</figcaption>" in source


def test_differences_to_a_method_of_choice(tmp_path: Path) -> None:
    results = report.read_results(make_results(tmp_path), base="alibi")
    table = results.tables["differences"]
    assert table is not None
    assert "minus that of ALiBi" in table.caption
    assert "alibi" not in table.rows
    found = {(row["method"], row["length"]): row["difference"] for row in table.records}
    assert found["rope", "16x"] == pytest.approx(2.198 - 1.246)
    with pytest.raises(ValueError, match=r"base must be a method of .*summary.json \(rope, .*\), got 'Rope'"):
        report.read_results(tmp_path, base="Rope")


def test_missing_summary_says_what_writes_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"summary.json is missing; `scaleinv compare` writes it"):
        report.write_report(tmp_path)
