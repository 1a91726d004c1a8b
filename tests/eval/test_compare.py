"""The comparison, with models that train for two steps."""

import dataclasses
import json
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from scaleinv.cli import main
from scaleinv.eval import Comparison, compare
from scaleinv.eval.compare import Job, _evaluated, _finished, _jobs, _Runner, summarize
from scaleinv.train.store import write_weights


@pytest.fixture
def plan(tmp_path, monkeypatch) -> Comparison:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text"
    text.mkdir()
    for number in range(12):
        (text / f"{number}.txt").write_text("".join(f"line {n} of text {number}\n" for n in range(80)))
    return Comparison(
        out=tmp_path / "out",
        methods=["rope", "yarn"],
        data=str(text),
        seeds=2,
        steps=2,
        train_length=32,
        lengths="1x,4x",
        tokens=1024,
        jobs=2,
    )


def test_trains_once_evaluates_every_row_and_never_repeats(plan):
    lines = []
    summary = compare(plan, lines.append).to_json()
    assert set(summary["loss"]) == {"rope", "yarn"}
    for row in ("rope", "yarn"):
        for label in ("1x", "4x"):
            files = [json.loads((plan.out / "evaluations" / f"{row}-seed{seed}.json").read_text()) for seed in (0, 1)]
            means = [file["lengths"][label]["mean"] for file in files]
            found = summary["loss"][row][label]
            assert found["seeds"] == 2
            assert found["mean"] == pytest.approx(statistics.fmean(means))
            assert found["stderr"] == pytest.approx(statistics.stdev(means) / 2**0.5)
    assert summary["loss"]["rope"]["1x"] == summary["loss"]["yarn"]["1x"]  # YaRN acts beyond the training length
    assert summary["loss"]["rope"]["4x"] != summary["loss"]["yarn"]["4x"]
    assert sorted(path.name for path in (plan.out / "runs").iterdir()) == ["rope-seed0", "rope-seed1"]
    assert summary["settings"]["corpus_sha256"]
    assert json.loads((plan.out / "summary.json").read_text()) == summary
    assert (plan.out / "curves" / "rope-seed1.jsonl").exists()
    written = {path: path.stat().st_mtime_ns for path in (plan.out / "runs").rglob("*.safetensors")}
    assert compare(plan, lines.append).to_json() == summary
    assert {path: path.stat().st_mtime_ns for path in (plan.out / "runs").rglob("*.safetensors")} == written


def test_other_lengths_are_evaluated_and_other_training_is_refused(plan):
    plan.methods, plan.seeds = ["rope"], 1
    compare(plan)
    weights = {path: path.stat().st_mtime_ns for path in (plan.out / "runs").rglob("*.safetensors")}
    longer = compare(dataclasses.replace(plan, lengths="1x,2x,4x"))
    assert set(longer.loss["rope"]) == {"1x", "2x", "4x"}
    path = plan.out / "evaluations" / "rope-seed0.json"
    assert {path: path.stat().st_mtime_ns for path in (plan.out / "runs").rglob("*.safetensors")} == weights
    run = plan.out / "runs" / "rope-seed0"
    assert _finished(run)
    assert _evaluated(plan, run, path)
    assert not _evaluated(dataclasses.replace(plan, tokens=512), run, path)
    model = load_file(run / "model.safetensors")
    write_weights(run, model, 1)  # as if killed before the last save
    assert not _finished(run)
    assert not _evaluated(plan, run, path)
    model["output.weight"] += 1
    write_weights(run, model, 2)  # other weights: trained again, say
    assert _finished(run)
    assert not _evaluated(plan, run, path)
    for changes in (
        {"steps": 3},
        {"train_length": 64},
        {"data": "stdlib"},
        {"preset": "162m"},
        {"order": "sequential"},
    ):
        with pytest.raises(ValueError, match=r"summary.json is of a comparison with .* use another out"):
            compare(dataclasses.replace(plan, **changes))
    (plan.out / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"config.json is of a comparison with steps=2, and steps=3 is asked for"):
        compare(dataclasses.replace(plan, steps=3))


def test_rows_of_an_earlier_command_stay(plan):
    plan.out.mkdir()
    path = plan.out / "summary.json"
    before = {row: {"1x": {"mean": 9.0, "stderr": None, "seeds": 1}} for row in ("alibi", "rope")}
    needle = {"rope": {"1x": {"accuracy": 0.5, "low": 0.4, "high": 0.6, "samples": 100}}}
    path.write_text(json.dumps({"loss": before, "needle": needle, "settings": {"data": plan.data}}))
    summary = summarize(plan).to_json()
    assert summary["loss"] == {"alibi": before["alibi"]}  # rope is asked for again, and not there yet
    assert summary["needle"] == needle


def test_sweep_on_the_command_line(plan, capsys):
    options = ["--data", plan.data, "--steps", "2", "--train-length", "32", "--lengths", "1x,2x", "--tokens", "256"]
    methods = ["--methods", "scale-invariant-p-rope", "--seeds", "1", "--sweep", "tau=3,3.0"]
    assert main(["compare", "--out", str(plan.out), *methods, *options]) == 0
    shown = capsys.readouterr().out
    assert "scale-invariant-p-rope" in shown
    assert f"report: {plan.out / 'report.html'}" in shown
    assert (plan.out / "report.html").exists()
    assert json.loads((plan.out / "sweep.json").read_text())["tau"].keys() == {"3", "10"}
    assert (plan.out / "figures" / "tau-sweep.png").exists()


def test_a_stopped_comparison_saves_and_goes_on(plan):
    command = [
        sys.executable,
        "-m",
        "scaleinv",
        "compare",
        "--methods",
        "rope,nope",
        "--seeds",
        "1",
        "--steps",
        "100000",
    ]
    options = ["--data", plan.data, "--train-length", "32", "--out", str(plan.out)]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        if "rope-seed0: step " in line:
            process.send_signal(signal.SIGTERM)
            break
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped; run the same command again to go on with" in rest
    assert "failed" not in rest
    run = plan.out / "runs" / "rope-seed0"
    assert list((run / "checkpoints").glob("step-*"))
    again = _Runner(plan, print, 1)._training(Job("rope", 0, ("rope",)), run)
    assert again[:2] == ["--resume", str(run)]


def test_a_failed_model_is_named_and_the_others_are_kept(plan, monkeypatch):
    plan.seeds, plan.methods = 1, ["rope", "nope"]
    whole = _Runner._training

    def broken(self, job, run):
        return [*whole(self, job, run), *(["--clip", "-1"] if job.model == "nope" else [])]

    monkeypatch.setattr(_Runner, "_training", broken)
    with pytest.raises(RuntimeError, match=r"nope-seed0: .*clip: must be positive"):
        compare(plan)
    assert set(json.loads((plan.out / "summary.json").read_text())["loss"]) == {"rope"}


def test_each_distinct_model_is_trained_once():
    plan = Comparison(out=Path("x"), seeds=2)
    jobs = _jobs(plan)
    assert len(jobs) == 2 * 11
    assert {job.model: job.rows for job in jobs}["rope"] == ("rope", "rope+ntk", "yarn")
    assert {row for job in jobs for row in job.rows} == set(plan.methods)
    assert [job.seed for job in jobs] == [0] * 11 + [1] * 11


def test_a_sweep_reuses_the_default_lengthscale():
    plan = Comparison(out=Path("x"), methods=["scale-invariant-p-rope"], seeds=1, tau=(1.0, 10.0, 100.0))
    assert [job.name for job in _jobs(plan)] == [
        "scale-invariant-p-rope-seed0",
        "scale-invariant-p-rope-tau1-seed0",
        "scale-invariant-p-rope-tau100-seed0",
    ]
    assert Job("rope", 3, ("rope",)).name == "rope-seed3"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ["ropes"]}, "unknown method 'ropes'"),
        ({"seeds": 0}, "seeds must be positive"),
        ({"tau": [0.0]}, "tau must be positive"),
        ({"jobs": 0}, "jobs must be positive"),
        ({"tokens": -3}, "tokens must be positive"),
        ({"lengths": "1x,foo"}, "lengths must read like"),
    ],
)
def test_errors_name_the_option(changes, message):
    with pytest.raises(ValueError, match=message):
        Comparison(out=Path("x"), **changes)
