"""The tables of a comparison."""

import csv
import json
from pathlib import Path

import pytest

from results_folder import EXTRA, KEYS, LOSSES, make_results
from scaleinv.eval.summary import parse_summary, read_summary
from scaleinv.plots import paper, tables
from scaleinv.plots.units import Unit
from scaleinv.reports.comparison import read_results

BYTES = Unit("byte", 1.0)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_results(tmp_path_factory.mktemp("results"))
    for table in read_results(folder).tables.values():
        assert table is not None
        table.save(folder / "tables")
    return folder


def test_tables(results: Path) -> None:
    lines = (results / "tables" / "loss.md").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "Validation loss (nats per byte), mean ± standard error, 2 seeds"
    assert lines[2] == "| method | 1× (512) | 4× (2k) | 16× (8k) | 1× → 16× |"
    assert "| rope | **1.145 ± 0.004** | 1.384 ± 0.004 | 2.198 ± 0.004 | +1.053 |" in lines
    assert "| scale-invariant-p-rope | 1.146 ± 0.004 | **1.141 ± 0.004** | **1.141 ± 0.004** | −0.005 |" in lines
    with (results / "tables" / "loss.csv").open(newline="", encoding="utf-8") as file:
        records = list(csv.DictReader(file))
    assert len(records) == len(LOSSES) * len(KEYS)
    assert records[0] == {
        "method": "rope",
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


def test_numbers_that_read_the_same_are_both_best_and_no_needle_found_is_not() -> None:
    loss = {"rope": {"1x": {"mean": 1.00001}}, "alibi": {"1x": {"mean": 1.00004}}, "nope": {"1x": {"mean": 1.1}}}
    needle = {"rope": {"1x": {"accuracy": 0.0}}, "alibi": {"1x": {"accuracy": 0.0}}}
    summary = parse_summary({"loss": loss, "needle": needle}, "summary")
    best = {name: cells[0].best for name, cells in tables.loss_table(summary).rows.items()}
    assert best == {"rope": True, "alibi": True, "nope": False}
    assert not any(cells[0].best for cells in tables.needle_table(summary).rows.values())


def test_lengths_in_tokens_are_ordered_among_multiples() -> None:
    loss = {"rope": {"4x": {"mean": 1.0}, "1000": {"mean": 1.0}, "1x": {"mean": 1.0}}}
    summary = parse_summary({"loss": loss, "settings": {"train_length": 512}}, "summary")
    assert tables.loss_table(summary).columns == ("1× (512)", "1,000 tokens", "4× (2k)", "1× → 4×")


def test_paper_numbers_are_complete() -> None:
    loss = tables.paper_table("paper-loss", "Loss", paper.LOSS, ())
    assert len(loss.rows) == 12
    assert [cell.best for cell in loss.rows["scale-invariant-p-rope"]] == [True] * 3
    assert loss.columns == ("1× (4k)", "4× (16k)", "16× (64k)")
    few = tables.paper_table("paper-needle", "Needle", paper.NEEDLE, ("alibi", "infini-rope", EXTRA))
    assert list(few.rows) == ["alibi"]


def test_terminal_table_is_aligned(results: Path) -> None:
    caption, *lines = tables.terminal_table(read_summary(results / "summary.json")).splitlines()
    assert caption.startswith("Validation loss")
    assert lines[0].split() == ["1×", "(512)", "4×", "(2k)", "16×", "(8k)", "1×", "→", "16×"]
    assert len({line.index(" ± ", 40) for line in lines[1:]}) == 1
    assert lines[1].startswith("rope ")
    assert "1.145 ± 0.004*" in lines[1]


def test_differences_are_paired_and_marked_within_noise(results: Path) -> None:
    lines = (results / "tables" / "differences.md").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("Loss minus that of Scale-invariant + p-RoPE (nats per byte), mean over the same seeds")
    assert lines[2] == "| method | 1× (512) | 4× (2k) | 16× (8k) |"
    # A seed adds 0.004 to both, which cancels, and 0.004 to one: ± 0.002. With two seeds noise is 12.7 times that.
    assert "| rope | *+0.001 ± 0.002* | +0.245 ± 0.002 | +1.059 ± 0.002 |" in lines
    assert not any("scale-invariant-p-rope |" in line for line in lines)
    with (results / "tables" / "differences.csv").open(newline="", encoding="utf-8") as file:
        first = next(csv.DictReader(file))
    assert (first["method"], first["length"], first["seeds"], first["windows"]) == ("rope", "1x", "2", "")
    assert first["within_noise"] == "True"
    assert float(first["difference"]) == pytest.approx(0.001)
    assert float(first["stderr"]) == pytest.approx(0.002)


def test_what_rounds_to_zero_has_no_sign() -> None:
    assert [tables.signed(value) for value in (-0.0004, 0.0, 0.0004, -0.0006)] == ["0.000", "0.000", "0.000", "−0.001"]


def test_no_difference_without_the_method() -> None:
    assert tables.difference_table({}, 512, BYTES) is None


def test_bits_per_byte_where_tokens_have_a_length() -> None:
    loss = {"rope": {"1x": {"mean": 2.0}}, "alibi": {"1x": {"mean": None}}}
    found = {}
    for tokens in ({"tokenizer": "bytes"}, {"tokenizer": "gpt2", "bytes_per_token": 4.0}, {"tokenizer": "gpt2"}):
        summary = parse_summary({"loss": loss, "settings": {"tokens": tokens}}, "summary")
        table = tables.bits_table(summary)
        found[str(tokens)] = table and [cells[0].text for cells in table.rows.values()]
    assert list(found.values()) == [["2.885", "diverged"], ["0.721", "diverged"], None]


def test_models_have_parameters_and_training_time(results: Path) -> None:
    table = read_results(results).tables["models"]
    assert table is not None
    assert [cell.text for cell in table.rows["rope"]] == ["852,000", "5.0"]
    assert [cell.text for cell in table.rows["logn+p-rope"]] == ["–", "5.0"]
    assert tables.model_table({}, {}) is None


@pytest.mark.parametrize(
    ("settings", "nats"),
    [
        ({}, "nats per token"),
        ({"tokens": 3, "tokenizer": None}, "nats per token"),
        ({"tokenizer": "gpt2"}, "nats per GPT-2 token"),
        ({"tokens": {"tokenizer": "bytes", "bytes_per_token": "x"}}, "nats per byte"),
        ({"tokens": {"tokenizer": "some/folder/bpe-4k/", "bytes_per_token": -1}}, "nats per bpe-4k token"),
    ],
)
def test_the_unit_names_the_tokenizer(settings: dict, nats: str) -> None:
    assert Unit.of(settings).nats == nats
