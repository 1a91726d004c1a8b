"""The needle evaluation as a whole: records that are not made twice, fine-tuning that goes on, the files."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from scaleinv import train
from scaleinv.cli import main
from scaleinv.data import ByteTokenizer, TokenData, write_shard
from scaleinv.eval import needle, needle_train
from scaleinv.eval.needle import default_task, evaluate, run_needle
from scaleinv.eval.needle_task import NeedleTask, make_sample
from scaleinv.eval.needle_train import NeedleTraining, finetune
from scaleinv.files import FolderInUse, locked
from scaleinv.model import GPT, GPTConfig
from scaleinv.model.config import preset
from scaleinv.train import checkpoint, store

TASK = NeedleTask(
    needles=2, digits=1, cities=("Oslo", "Lima", "Rome"), length=96, needle=" {city} is {number}.", question="\n"
)
TRAINING = NeedleTraining(steps=6, warmup=2, decay=2, sequences=2, checkpoint_every=2, log_every=1)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> TokenData:
    path = tmp_path_factory.mktemp("shards") / "text.bin"
    write_shard(path, np.random.default_rng(0).integers(32, 127, 4000).astype(np.uint16))
    return TokenData([path], 256)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A tiny RoPE run on two files of text."""
    folder = tmp_path_factory.mktemp("run")
    for number in range(4):
        (folder / f"{number}.txt").write_text("".join(f"{i * 37 % 101} sheep, and so on. " for i in range(60 + number)))
    model = GPTConfig(layers=1, width=32, heads=2, method="rope", train_length=96)
    config = train.TrainConfig(
        model=model, data=str(folder), out=str(folder / "run"), steps=2, batch_tokens=192, val_tokens=400,
        val_lengths="1x", seed=3, device="cpu",
    )  # fmt: skip
    train.run(config)
    return folder / "run"


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=1, width=32, heads=2, vocab_size=257, train_length=96))
    nn.init.normal_(model.output.weight)
    return model


def test_evaluate_is_deterministic_and_batches_do_not_matter(model, data):
    first, second = (
        evaluate(model, data, ByteTokenizer(), TASK, {"1x": 96, "2x": 192}, samples=5, batch_tokens=tokens)
        for tokens in (96, 4096)
    )
    assert list(first) == ["1x", "2x"]
    for label in first:
        assert first[label]["answer_loss"] == pytest.approx(second[label]["answer_loss"], rel=1e-5)
        assert {k: v for k, v in first[label].items() if k != "answer_loss"} == {
            k: v for k, v in second[label].items() if k != "answer_loss"
        }


def test_finished_samples_are_not_repeated(model, data, tmp_path, monkeypatch):
    def go(samples):
        return evaluate(
            model,
            data,
            ByteTokenizer(),
            TASK,
            {"1x": 96},
            samples=samples,
            records=tmp_path / "r.jsonl",
            batch_tokens=192,
        )

    asked = []
    read = needle.read_samples
    monkeypatch.setattr(
        needle,
        "read_samples",
        lambda m, samples, *rest: asked.extend(s.index for s in samples) or read(m, samples, *rest),
    )
    whole = go(7)
    assert asked == list(range(7))
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    assert len(lines) == 8
    asked.clear()
    assert go(7) == whole
    assert asked == []
    # A killed run: three samples are there, and half of the fourth.
    (tmp_path / "r.jsonl").write_text("\n".join(lines[:4]) + "\n" + lines[4][:30])
    again = go(7)
    assert asked == [3, 4, 5, 6]
    assert again["1x"]["accuracy"] == whole["1x"]["accuracy"]
    assert again["1x"]["answer_loss"] == pytest.approx(whole["1x"]["answer_loss"])
    assert [json.loads(line)["index"] for line in (tmp_path / "r.jsonl").read_text().splitlines()[1:]] == list(range(7))
    with pytest.raises(ValueError, match=r"records .* another run, task or training"):
        evaluate(model, data, ByteTokenizer(), TASK, {"1x": 96}, seed=1, records=tmp_path / "r.jsonl")


@pytest.mark.parametrize("argument", ["samples", "batch_tokens", "depths"])
def test_evaluate_refuses_nonsense(argument, model, data):
    with pytest.raises(ValueError, match=argument):
        evaluate(model, data, ByteTokenizer(), TASK, {"1x": 96}, **{argument: 0})
    with pytest.raises(ValueError, match="lengths"):
        evaluate(model, data, ByteTokenizer(), TASK, {})


def test_papers_schedule():
    training = NeedleTraining()
    rates = [training.learning_rate(step) for step in range(300)]
    assert rates[0] == 0.01
    assert rates[99:201] == [1.0] * 102
    assert rates[250] == 0.5
    assert rates[299] == 0.01
    assert training.sequences == 64
    assert {training.length(step, 4096) for step in range(300)} == {4096}


def test_the_shortest_samples_have_room_for_text(data):
    task, training = dataclasses.replace(NeedleTask.mini(), digits=2, cities=8), NeedleTraining.mini()
    assert training.fitted(task, ByteTokenizer()) == training
    long = dataclasses.replace(task, needles=3, digits=4)
    with pytest.raises(ValueError, match="must leave room for text"):
        make_sample(long.at(training.shortest), data, ByteTokenizer(), seed=0, index=0)
    shortest = training.fitted(long, ByteTokenizer()).shortest
    for index in range(20):
        sample = make_sample(long.at(shortest), data, ByteTokenizer(), seed=0, index=index)
        frame = sum(len(long.sentence(needle.city, needle.number)) for needle in sample.needles)
        assert shortest - frame - len(long.question) - len(sample.answer) >= shortest // 3


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("steps", 0),
        ("sequences", 0),
        ("warmup", -1),
        ("decay", 250),
        ("rate", 0.0),
        ("rate", float("inf")),
        ("seed", -1),
        ("precision", "half"),
    ],
)
def test_bad_training_is_refused_by_name(argument, value):
    with pytest.raises(ValueError, match=argument):
        NeedleTraining(**{argument: value})


def test_the_loss_is_on_the_answer_alone(model, data):
    sample = needle.make_sample(TASK, data, ByteTokenizer(), seed=0, index=0)
    tokens, mask = needle_train.stack([sample])
    logits, targets = needle_train.answer_logits(model, tokens, mask)
    assert bytes(targets.tolist()).decode() == sample.answer
    whole = model(tokens)[0, sample.answer_start - 1 : -1]
    torch.testing.assert_close(logits, whole)


def test_finetuning_goes_on_bitwise_and_is_a_run(run, tmp_path, monkeypatch):
    whole = finetune(run, tmp_path / "whole", TASK, TRAINING)
    step = needle_train._gradients

    def die_in_step_5(*args):
        if args[-1] == 4:
            raise KeyboardInterrupt
        return step(*args)

    monkeypatch.setattr(needle_train, "_gradients", die_in_step_5)
    with pytest.raises(KeyboardInterrupt):
        finetune(run, tmp_path / "killed", TASK, TRAINING)
    monkeypatch.setattr(needle_train, "_gradients", step)
    lines: list[str] = []
    finetune(run, tmp_path / "killed", TASK, TRAINING, progress=lines.append)
    assert "at step 4" in lines[0]
    first, second = (load_file(folder / "model.safetensors") for folder in (whole, tmp_path / "killed"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    before = load_file(run / "model.safetensors")
    assert any(not torch.equal(first[name], before[name]) for name in first)
    metrics = [[json.loads(x)["loss"] for x in (tmp_path / n / "metrics.jsonl").open()] for n in ("whole", "killed")]
    assert metrics[0] == metrics[1]
    assert len(metrics[0]) == 6
    _, config = store.load_model(whole)
    assert config.model.method == "rope"
    assert isinstance(store.run_tokenizer(whole), ByteTokenizer)
    # Finished: it returns at once. Anything else in that folder is refused.
    monkeypatch.setattr(needle_train, "_gradients", None)
    finetune(run, whole, TASK, TRAINING)
    with pytest.raises(ValueError, match=r"out .* another run, task or training"):
        finetune(run, whole, TASK, dataclasses.replace(TRAINING, rate=0.5))
    with pytest.raises(ValueError, match=r"out .* already holds a run"):
        finetune(run, run, TASK, TRAINING)


def test_finetuning_in_bfloat16_is_another_training(run, tmp_path):
    exact = finetune(run, tmp_path / "exact", TASK, TRAINING)
    rounded = finetune(run, tmp_path / "rounded", TASK, dataclasses.replace(TRAINING, precision="bfloat16"))
    curves = [[json.loads(x)["loss"] for x in (path / "metrics.jsonl").open()] for path in (exact, rounded)]
    assert curves[0] != curves[1]
    assert curves[0] == pytest.approx(curves[1], rel=0.05)
    with pytest.raises(ValueError, match=r"out .* another run, task or training"):
        finetune(run, exact, TASK, dataclasses.replace(TRAINING, precision="bfloat16"))


def test_damaged_weights_of_a_finetuning_are_written_anew(run, tmp_path, monkeypatch):
    finetune(run, tmp_path, TASK, TRAINING)
    before = store.weights_digest(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    monkeypatch.setattr(needle_train, "_gradients", None)  # nothing is trained again
    finetune(run, tmp_path, TASK, TRAINING)
    assert store.weights_digest(tmp_path) == before


def test_a_finetuning_has_one_writer(run, tmp_path):
    with locked(tmp_path), pytest.raises(FolderInUse, match=f"{tmp_path} is in use by"):
        finetune(run, tmp_path, TASK, TRAINING)


def test_a_loss_that_is_not_finite_stops_it(run, tmp_path, monkeypatch):
    monkeypatch.setattr(needle_train, "_gradients", lambda *args: (math.nan, 0.0))
    with pytest.raises(train.Diverged, match="rate"):
        finetune(run, tmp_path, TASK, TRAINING)


def test_finetuning_learns(data, tmp_path, run):
    """Not the needles, in a few steps, but the form of the answer: its loss falls."""
    finetune(run, tmp_path, TASK, NeedleTraining(steps=30, warmup=2, decay=10, sequences=8))
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").open()]
    assert np.mean(losses[-5:]) < 0.6 * losses[0]


def ask(run, out, lengths="1x,150", **options):
    return run_needle(run, lengths, out, **{"task": TASK, "training": TRAINING, "samples": 3, **options})


@pytest.fixture(scope="module")
def finished(run, tmp_path_factory) -> Path:
    """A folder with the results of one run as three methods."""
    folder = tmp_path_factory.mktemp("finished")
    ask(run, folder, methods=["rope", "rope+ntk", "yarn"])
    return folder


@pytest.fixture
def asked(finished, tmp_path) -> Path:
    """A copy of it for one test."""
    shutil.copytree(finished, tmp_path / "asked")
    return tmp_path / "asked"


def test_results_of_every_method_are_written(finished):
    results = {
        name: json.loads((finished / "needle" / f"{name}-seed3.json").read_text()) for name in ("rope", "rope+ntk")
    }
    for name, result in results.items():
        assert (result["row"], result["seed"]) == (name, 3)
        assert {label: at["length"] for label, at in result["lengths"].items()} == {"1x": 96, "150": 150}
        assert set(result["lengths"]["1x"]) == {
            "length", "accuracy", "low", "high", "samples", "token_accuracy", "answer_loss", "depths",
        }  # fmt: skip
        assert len((finished / "needle" / f"{name}-seed3.jsonl").read_text().splitlines()) == 1 + 2 * 3
    rope, ntk = (results[name]["lengths"] for name in ("rope", "rope+ntk"))
    assert rope["1x"] == ntk["1x"]  # no stretch at the training length
    assert rope["150"]["answer_loss"] != ntk["150"]["answer_loss"]


def test_accuracies_enter_the_summary(finished):
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["loss"] == {}
    assert list(summary["needle"]) == ["rope", "rope+ntk", "yarn"]
    assert set(summary["needle"]["yarn"]["1x"]) == {"accuracy", "low", "high", "samples", "seeds"}
    assert summary["needle"]["yarn"]["1x"]["seeds"].keys() == {"3"}


def test_what_is_done_is_not_repeated(run, asked, monkeypatch):
    before = json.loads((asked / "needle" / "yarn-seed3.json").read_text())
    monkeypatch.setattr(needle_train, "_gradients", None)
    monkeypatch.setattr(needle, "read_samples", None)
    assert json.loads(json.dumps(ask(run, asked, methods=["yarn"])["yarn"])) == before


def test_certified_answers_are_kept_apart_and_share_the_model(run, asked, monkeypatch):
    summary = (asked / "summary.json").read_text()
    exact = json.loads((asked / "needle" / "rope-seed3.json").read_text())["lengths"]["1x"]
    monkeypatch.setattr(needle_train, "_gradients", None)  # the fine-tuned model is there
    certified = ask(run, asked, "1x", tolerance=0.0)["rope"]
    assert certified["settings"]["tolerance"] == 0.0
    assert certified["lengths"]["1x"]["answer_loss"] == pytest.approx(exact["answer_loss"], rel=1e-4)
    assert (asked / "needle" / "certified" / "0" / "rope-seed3.json").exists()
    assert (asked / "summary.json").read_text() == summary


def test_other_lengths_join(run, asked):
    assert set(ask(run, asked, "200")["rope"]["lengths"]) == {"1x", "150", "200"}


def test_other_samples_do_not_mix(run, asked):
    for name in ("needle/rope-seed3.jsonl", "summary.json"):
        (asked / name).unlink()
    again = ask(run, asked, "150", samples=2, seed=1)
    assert set(again["rope"]["lengths"]) == {"150"}
    (asked / "summary.json").unlink()
    assert set(ask(run, asked, "150", methods=["yarn"])["yarn"]["lengths"]) == {"1x", "150"}


def test_another_task_is_refused_before_anything_is_trained(run, asked, monkeypatch):
    monkeypatch.setattr(needle, "finetune", None)
    other = dataclasses.replace(TASK, digits=TASK.digits + 1)
    with pytest.raises(ValueError, match=r"rope\+ntk-seed3.json has needle results of another task"):
        ask(run, asked, task=other)
    every = ["rope", "rope+ntk", "yarn"]
    with pytest.raises(ValueError, match=r"rope-seed3.jsonl are of another run, task or training"):
        ask(run, asked, task=other, methods=every)
    for name in every:
        (asked / "needle" / f"{name}-seed3.json").unlink()
    with pytest.raises(ValueError, match=r"summary.json has needle results of another task"):
        ask(run, asked, task=other)


def test_damaged_results_are_made_again_and_damaged_records_named(run, asked, monkeypatch):
    monkeypatch.setattr(needle_train, "_gradients", None)
    path = asked / "needle" / "rope-seed3.json"
    whole = json.loads(path.read_text())
    path.write_text("{")
    ask(run, asked)
    assert json.loads(path.read_text()) == whole
    records = path.with_suffix(".jsonl")
    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join(lines) + lines[-1][:20])  # half a line at the end: what a killed program leaves
    ask(run, asked)
    records.write_text("".join([*lines[:2], "{\n", *lines[2:]]))
    with pytest.raises(ValueError, match=r"rope-seed3\.jsonl line 3 is not JSON.*delete it to ask its samples again"):
        ask(run, asked)
    records.write_text("".join([*lines[:2], '{"length": 3}\n']))
    with pytest.raises(ValueError, match=r"rope-seed3\.jsonl has a line that is not a sample"):
        ask(run, asked)


@pytest.mark.slow
def test_command_line_draws_and_its_folder_can_be_reported(run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    task = ["--needles", "1", "--digits", "2", "--steps", "2", "--samples", "2", "--lengths", "1x,150"]
    assert main(["needle", str(run), *task, "--out", str(tmp_path)]) == 0
    assert f"figure: {tmp_path / 'figures' / 'needle-depth.png'}" in capsys.readouterr().out
    assert main(["report", str(tmp_path)]) == 0
    assert "training length" in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "summary.json").read_text())["settings"]["train_length"] == 96


def test_run_needle_refuses_before_it_trains(run, tmp_path):
    with pytest.raises(ValueError, match="methods must be served by"):
        run_needle(run, "1x", tmp_path, methods=["alibi"])
    with pytest.raises(ValueError, match="samples must be a positive integer, got 0"):
        run_needle(run, "1x", tmp_path, samples=0)
    with pytest.raises(ValueError, match="device must be auto"):
        run_needle(run, "1x", tmp_path, device="abacus")
    with pytest.raises(ValueError, match="lengths"):
        run_needle(run, "1y", tmp_path)
    with pytest.raises(ValueError, match=r"length .* but the split has"):
        run_needle(run, "1x,1000000", tmp_path, task=TASK, training=TRAINING)
    assert checkpoint.newest(tmp_path / "needle" / "models" / "rope-seed3" / "checkpoints") is None
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_defaults_by_size():
    assert default_task(preset("mini")) == (NeedleTask.mini(), NeedleTraining.mini())
    assert default_task(preset("162m")) == (NeedleTask(), NeedleTraining())
