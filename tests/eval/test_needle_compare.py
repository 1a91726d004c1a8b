"""Needles for all models of a comparison: which models, what is written, what is refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from small_runs import SMALL, make_texts

from scaleinv.cli import main
from scaleinv.eval import Comparison, compare
from scaleinv.eval.needle_compare import is_comparison, needle_comparison
from scaleinv.eval.needle_task import NeedleTask
from scaleinv.eval.needle_train import NeedleTraining
from scaleinv.eval.work import NeedleWork, read_work

TASK = NeedleTask(needles=1, digits=1, cities=("Oslo", "Lima"), length=128, needle=" {city} {number}.", question="\n")
TRAINING = NeedleTraining(steps=2, warmup=0, decay=1, sequences=2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A comparison of one model, two seeds, as rope and yarn."""
    folder = tmp_path_factory.mktemp("needles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        settings = {**SMALL, "train_length": 128, "batch_tokens": 128, "data": make_texts(folder / "text")}
        plan = Comparison(folder / "out", ["rope", "yarn"], train=settings, seeds=2, lengths="1x", tokens=256, jobs=2)
        compare(plan)
    return plan.out


@pytest.fixture
def compared(finished, tmp_path):
    """A copy of it for one test."""
    return Path(shutil.copytree(finished, tmp_path / "compared"))


def test_work_goes_through_json():
    work = NeedleWork("runs/a", "1x", "out", ("rope", "yarn"), TASK, TRAINING, 3, None, "cpu", None)
    assert read_work(work.to_json()) == work


@pytest.mark.slow
def test_every_seed_is_asked_and_pooled(compared):
    lines = []
    options = {"task": TASK, "training": TRAINING, "samples": 3}
    found = needle_comparison(compared, "1x,200", **options, progress=lines.append)
    assert list(found) == ["rope", "yarn"]
    assert found["yarn"]["lengths"]["200"]["samples"] == 6
    assert found["yarn"]["lengths"]["200"]["seeds"].keys() == {"0", "1"}
    summary = json.loads((compared / "summary.json").read_text())
    assert summary["needle"].keys() == summary["loss"].keys()
    assert summary["needle"]["rope"]["1x"]["samples"] == 6
    files = {path.name for path in (compared / "needle").glob("*.json")}
    assert files == {f"{method}-seed{seed}.json" for method in ("rope", "yarn") for seed in (0, 1)}
    seeds = [json.loads((compared / "needle" / f"rope-seed{seed}.json").read_text())["samples_seed"] for seed in (0, 1)]
    assert seeds == [0, 1]
    assert lines[0] == "2 models to fine-tune and ask; 2 at once"
    assert lines[-1].startswith("2 of 2 models in ")
    # Once more: nothing is trained or asked again, and the results are the same.
    assert needle_comparison(compared, "1x,200", **options) == found
    with pytest.raises(ValueError, match="results of another task or training"):
        needle_comparison(compared, "1x", methods=["rope"], task=dataclasses.replace(TASK, digits=2), training=TRAINING)


@pytest.mark.slow
def test_command_line_takes_a_comparison(compared, capsys):
    task = ["--cities", "1", "--digits", "1", "--needles", "1", "--steps", "2", "--samples", "2", "--lengths", "200"]
    assert main(["needle", str(compared), "--methods", "rope", *task]) == 0
    *_, asked, png, _ = capsys.readouterr().out.splitlines()
    assert asked.split()[:2] == ["rope", "200"]
    assert png == f"figure: {compared / 'figures' / 'needle-depth.png'}"


@pytest.mark.slow
def test_what_cannot_be_asked_is_refused(compared, tmp_path, capsys):
    assert is_comparison(compared)
    assert not is_comparison(compared / "runs" / "rope-seed0")
    with pytest.raises(ValueError, match=r"methods must be served by a model in .*'alibi'"):
        needle_comparison(compared, methods=["alibi"])
    with pytest.raises(ValueError, match="length must leave room for text"):
        needle_comparison(compared, "8", task=TASK)
    assert main(["needle", str(compared / "runs" / "rope-seed0"), "--jobs", "2"]) == 2
    assert "--jobs is for a comparison" in capsys.readouterr().err
    (tmp_path / "empty" / "runs").mkdir(parents=True)
    with pytest.raises(ValueError, match="has no finished models"):
        needle_comparison(tmp_path / "empty")
