"""The comparison, with models that train for two steps."""

import dataclasses
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys

import pytest
from safetensors.torch import load_file
from small_runs import SMALL, make_texts

from scaleinv.cli import main
from scaleinv.eval import Comparison, compare
from scaleinv.eval.compare import summarize, work_left
from scaleinv.eval.plan import finished
from scaleinv.files import FolderInUse, locked
from scaleinv.train.store import write_weights


def weights(plan: Comparison) -> dict:
    return {path: path.stat().st_mtime_ns for path in (plan.out / "runs").rglob("*.safetensors")}


def change(plan: Comparison, **settings) -> Comparison:
    return dataclasses.replace(plan, train={**plan.train, **settings})


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> Comparison:
    """One model, one method, one seed, compared."""
    folder = tmp_path_factory.mktemp("compared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        train = {**SMALL, "data": make_texts(folder / "text")}
        plan = Comparison(folder / "out", ["rope"], train=train, seeds=1, lengths="1x,4x", tokens=1024)
        compare(plan)
    return plan


@pytest.fixture
def one(compared, tmp_path, monkeypatch) -> Comparison:
    """A copy of the comparison for one test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(compared.out.parent / "cache"))
    shutil.copytree(compared.out, tmp_path / "out")
    return dataclasses.replace(compared, out=tmp_path / "out")


@pytest.mark.slow
def test_the_summary_says_how_many_tokens_were_used(one):
    """Here fewer than are asked for: the held-out text has no more."""
    summary = compare(dataclasses.replace(one, tokens=10**9))
    found = json.loads((one.out / "evaluations" / "rope-seed0.json").read_text())["lengths"]["4x"]
    assert summary.settings["validation_tokens"] == found["windows"] * found["length"] < 10**9


@pytest.mark.slow
def test_trains_once_evaluates_every_method_and_never_repeats(plan):
    lines = []
    summary = compare(plan, lines.append).to_json()
    assert set(summary["loss"]) == {"rope", "yarn"}
    for method in ("rope", "yarn"):
        for label in ("1x", "4x"):
            paths = [plan.out / "evaluations" / f"{method}-seed{seed}.json" for seed in (0, 1)]
            means = [json.loads(path.read_text())["lengths"][label]["mean"] for path in paths]
            found = summary["loss"][method][label]
            assert found["seeds"] == 2
            assert found["mean"] == pytest.approx(statistics.fmean(means))
            assert found["stderr"] == pytest.approx(statistics.stdev(means) / 2**0.5)
    assert summary["loss"]["rope"]["1x"] == summary["loss"]["yarn"]["1x"]  # YaRN acts beyond the training length
    assert summary["loss"]["rope"]["4x"] != summary["loss"]["yarn"]["4x"]
    assert sorted(path.name for path in (plan.out / "runs").iterdir()) == ["rope-seed0", "rope-seed1"]
    assert summary["settings"]["corpus_sha256"]
    assert summary["settings"]["steps"] == 2
    assert summary["settings"]["tokens"] == {"tokenizer": "bytes", "vocabulary": 257, "bytes_per_token": 1.0}
    trained = load_file(plan.out / "runs" / "rope-seed0" / "model.safetensors")
    assert summary["settings"]["parameters"] == {"rope": sum(tensor.numel() for tensor in trained.values())}
    assert json.loads((plan.out / "summary.json").read_text()) == summary
    assert (plan.out / "curves" / "rope-seed1.jsonl").exists()
    assert any(re.search(r"\d of 2 models, [\d:]+ left: .*rope-seed0", line) for line in lines)
    before = weights(plan)
    assert compare(plan, lines.append).to_json() == summary
    assert compare(dataclasses.replace(plan, seeds=1)).to_json() == summary  # both seeds still count
    assert weights(plan) == before


@pytest.mark.slow
def test_other_lengths_are_evaluated_without_training(one):
    before = weights(one)
    longer = compare(dataclasses.replace(one, lengths="0.5x,1x,4x"))
    assert set(longer.loss["rope"]) == {"0.5x", "1x", "4x"}
    assert weights(one) == before


@pytest.mark.slow
def test_what_is_done_depends_on_weights_and_tokens(one):
    (job,) = one.all_jobs()
    run = one.run(job)
    assert work_left(one, job) is None
    other = dataclasses.replace(one, tokens=512)
    assert work_left(other, job).train is None
    model = load_file(run / "model.safetensors")
    write_weights(run, model, 1)  # as if killed before the last save
    assert not finished(run)
    assert work_left(one, job).resume
    assert work_left(one, job).methods == ("rope",)
    model["output.weight"] += 1
    write_weights(run, model, 2)  # other weights: trained again, say
    assert finished(run)
    assert work_left(one, job).methods == ("rope",)
    path = one.evaluation(job, "rope")
    path.write_text(path.read_text()[:-20])  # a damaged evaluation is made again
    assert work_left(one, job).methods == ("rope",)
    compare(one)
    assert work_left(one, job) is None


@pytest.mark.slow
def test_damaged_weights_are_mended(one):
    (job,) = one.all_jobs()
    path = one.run(job) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    compare(one)
    assert work_left(one, job) is None


@pytest.mark.slow
def test_a_folder_takes_one_training(one):
    for changes in ({"steps": 3}, {"train_length": 64}, {"lr_output": 0.5}, {"order": "sequential"}):
        with pytest.raises(ValueError, match=r"summary.json is of a comparison with .* choose another out"):
            compare(change(one, **changes))
    (one.out / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"config.json is of a comparison with steps=2, but steps=3 is asked for"):
        compare(change(one, steps=3))
    compare(change(one, keep=2, log_every=1))  # which do not matter


@pytest.mark.slow
def test_other_data_are_refused(one, tmp_path):
    other = make_texts(tmp_path / "other")
    compare(change(one, data=other))  # the same texts in another folder are the same data
    (tmp_path / "other" / "more.txt").write_text("another text\n" * 50)
    with pytest.raises(ValueError, match=r"summary.json is of a comparison with corpus_sha256="):
        compare(change(one, data=other))


def test_methods_of_an_earlier_command_stay(plan):
    plan.out.mkdir()
    path = plan.out / "summary.json"
    before = {name: {"1x": {"mean": 9.0, "stderr": None, "seeds": 1}} for name in ("alibi", "rope")}
    needle = {"rope": {"1x": {"accuracy": 0.5, "low": 0.4, "high": 0.6, "samples": 100}}}
    path.write_text(json.dumps({"loss": before, "needle": needle, "settings": {}}))
    summary = summarize(plan).to_json()
    assert summary["loss"] == {"alibi": before["alibi"]}  # rope is asked for again, and not there yet
    assert summary["needle"] == needle


def refuse_work(monkeypatch) -> None:
    def run(self, work, receive):
        raise AssertionError("work began")

    monkeypatch.setattr("scaleinv.eval.workers.Workers.run", run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"data": "nope.txt"}}, "nope.txt"),
        ({"train": {"device": "cuda:99"}}, "device cuda:99 is not available"),
        ({"tokens": 5}, "validation at length 128 needs at least 129 tokens"),
        ({"lengths": "1x,400x"}, "validation at length 12800 needs at least 12801 tokens"),
    ],
)
def test_what_would_stop_all_is_found_before_any_work(plan, monkeypatch, changes, message):
    refuse_work(monkeypatch)
    train = {**plan.train, **changes.pop("train", {})}
    lines = []
    with pytest.raises(ValueError, match=message):
        compare(dataclasses.replace(plan, train=train, **changes), lines.append)
    assert lines == []
    assert not plan.out.exists()


def test_two_comparisons_do_not_share_a_folder(plan, monkeypatch):
    refuse_work(monkeypatch)
    plan.out.mkdir()
    with locked(plan.out), pytest.raises(FolderInUse, match="is in use by"):
        compare(plan)


def test_a_summary_from_before_windows_had_an_order_was_sequential(plan, monkeypatch):
    refuse_work(monkeypatch)
    plan.out.mkdir()
    (plan.out / "summary.json").write_text('{"loss": {"nope": {"1x": {"mean": 1}}}, "settings": {"steps": 2}}')
    with pytest.raises(ValueError, match=r"is of a comparison with order=sequential, but order=random is asked for"):
        compare(plan)


def test_a_damaged_summary_is_named_before_any_work(plan, monkeypatch):
    refuse_work(monkeypatch)
    plan.out.mkdir()
    (plan.out / "summary.json").write_text('{"loss": [')
    with pytest.raises(ValueError, match=r"summary\.json is not JSON.*delete a damaged file"):
        compare(plan)


def test_a_damaged_run_is_named_before_any_work(plan, monkeypatch):
    refuse_work(monkeypatch)
    run = plan.out / "runs" / "rope-seed0"
    run.mkdir(parents=True)
    (run / "config.json").write_text('{"train": 3}')
    with pytest.raises(ValueError, match=r"rope-seed0/config\.json .*delete .*rope-seed0 to train it again"):
        compare(plan)


@pytest.mark.slow
def test_sweep_on_the_command_line(plan, text, capsys):
    options = ["--data", text, "--steps", "2", "--train-length", "32", "--lengths", "1x,2x", "--tokens", "256"]
    methods = ["--methods", "scale-invariant-p-rope", "--seeds", "1", "--sweep", "tau=3,3.0"]
    assert main(["compare", "--out", str(plan.out), *methods, *options]) == 0
    shown = capsys.readouterr().out
    assert "scale-invariant-p-rope" in shown
    assert f"report: {plan.out / 'report.html'}" in shown
    assert (plan.out / "report.html").exists()
    assert json.loads((plan.out / "sweep.json").read_text())["tau"].keys() == {"3", "10"}
    assert (plan.out / "figures" / "tau-sweep.png").exists()


@pytest.mark.slow
def test_a_stopped_comparison_saves_and_resumes(plan, text):
    command = [sys.executable, "-m", "scaleinv", "compare", "--methods", "rope,nope", "--seeds", "1"]
    options = ["--steps", "100000", "--data", text, "--train-length", "32", "--out", str(plan.out)]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        if "seed0 step " in line:
            process.send_signal(signal.SIGTERM)
            break
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped; run the same command again to resume" in rest
    assert "failed" not in rest
    assert list((plan.out / "runs").glob("*/checkpoints/step-*"))
    again = Comparison(plan.out, ["rope"], train={"steps": 100000, "data": text, "train_length": 32}, seeds=1)
    left = work_left(again, again.all_jobs()[0])
    assert left.resume
    assert left.train.out == left.run


@pytest.mark.slow
def test_a_failed_model_is_named_and_the_others_are_kept(plan):
    plan = dataclasses.replace(plan, methods=["rope", "nope"], seeds=1)
    blocked = plan.out / "runs" / "nope-seed0"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where a folder should be")
    with pytest.raises(RuntimeError, match=r"some models failed: nope-seed0: out cannot be written to"):
        compare(plan)
    assert set(json.loads((plan.out / "summary.json").read_text())["loss"]) == {"rope"}
