"""Nothing is lost: runs are killed for real, and go on as if they had not been."""

import dataclasses
import json
import logging
import signal
import time
from pathlib import Path

import pytest
import torch
from run_files import finish, losses
from safetensors.torch import load_file

from scaleinv import train
from scaleinv.files import FolderInUse
from scaleinv.train import checkpoint, loop
from scaleinv.train.store import read_config


def wait_for_step(config: train.TrainConfig, step: int, process) -> None:
    """Until the run has written the metrics of a step."""
    path = Path(config.out) / "metrics.jsonl"
    for _ in range(3000):
        if path.exists() and path.read_text().count("\n") >= step:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


@pytest.mark.slow
@pytest.mark.parametrize("kill_at", [1, 5])
def test_killed_run_resumes_bitwise(tiny, start, tmp_path, kill_at):
    whole = tiny("logn+p-rope", out=str(tmp_path / "whole"), steps=9)
    killed = dataclasses.replace(whole, out=str(tmp_path / "killed"))
    finish(start(whole))
    process = start(killed)
    wait_for_step(killed, kill_at, process)
    process.kill()
    process.wait()
    finish(start(killed, resume=True))
    assert losses(killed.out) == losses(whole.out)
    first, second = (load_file(f"{config.out}/model.safetensors") for config in (whole, killed))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_from_before_the_order_was_chosen_resumes_in_sequence(tiny, tmp_path):
    wholes = {order: tiny(out=str(tmp_path / order), order=order, decay=0.0) for order in ("sequential", "random")}
    for config in wholes.values():
        train.run(config)
    old = dataclasses.replace(wholes["sequential"], out=str(tmp_path / "old"), steps=2)
    train.run(old)
    path = tmp_path / "old" / "config.json"
    values = json.loads(path.read_text())
    del values["train"]["order"]
    path.write_text(json.dumps(values))
    config, _ = read_config(path.parent)
    assert config == old
    train.run(dataclasses.replace(config, steps=6), resume=True)
    assert losses(old.out) == losses(wholes["sequential"].out) != losses(wholes["random"].out)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_and_leaves(tiny, start, number):
    config = tiny(steps=100_000, checkpoint_every=100_000)
    process = start(config)
    wait_for_step(config, 3, process)
    process.send_signal(number)
    output = finish(process)
    assert "stopped at step" in output
    path, manifest = checkpoint.newest(Path(config.out) / "checkpoints")
    assert manifest["step"] == max(losses(config.out))
    assert path.name == f"step-{manifest['step']:06d}"


@pytest.mark.parametrize("damage", ["cut", "flip", "delete", "manifest"])
def test_damaged_checkpoint_is_reported_and_passed_over(tiny, tmp_path, damage, caplog):
    config = tiny(steps=6, keep=2)
    train.run(config)
    expected = losses(config.out)
    newest = Path(config.out) / "checkpoints" / "step-000006"
    weights = next(newest.glob("*.safetensors"))
    content = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(content[:-1])
    elif damage == "flip":
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "delete":
        weights.unlink()
    else:
        (newest / "manifest.json").write_text("{")
    lines = []
    with caplog.at_level(logging.WARNING):
        train.run(config, resume=True, progress=lines.append)
    assert "is damaged" in caplog.text
    assert any("at step 4" in line for line in lines)
    assert losses(config.out) == expected


def test_changed_data_is_refused(tiny, book):
    config = tiny(steps=4)
    train.run(config)
    for path in book.iterdir():
        path.write_text(path.read_text().replace("fox", "cat"))
    with pytest.raises(ValueError, match="the data changed after"):
        train.run(dataclasses.replace(config, steps=6), resume=True)


def test_checkpoints_hold_no_pickle(tiny):
    config = tiny(steps=2)
    train.run(config)
    kinds = {path.suffix for path in Path(config.out).rglob("*") if path.is_file() and "tensorboard" not in str(path)}
    assert kinds <= {".json", ".jsonl", ".safetensors"}


def test_a_run_that_falls_back_keeps_what_it_writes(tiny, monkeypatch):
    """The newest checkpoint is damaged and keep is 1: what the resumed run saves must not be deleted for it."""
    config = tiny(steps=4, checkpoint_every=2, keep=1)
    train.run(config)
    expected = losses(config.out)
    folder = Path(config.out) / "checkpoints"
    weights = next((folder / "step-000004").glob("*.safetensors"))
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    step = loop._Run._step

    def die_in_step_4(self, number, factor):
        if number == 3:
            raise KeyboardInterrupt
        return step(self, number, factor)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "_step", die_in_step_4)
        with pytest.raises(KeyboardInterrupt):
            train.run(config, resume=True)
    assert checkpoint.newest(folder)[1]["step"] == 2
    lines = []
    train.run(config, resume=True, progress=lines.append)
    assert f"resuming {config.out} at step 2" in lines
    assert losses(config.out) == expected


@pytest.mark.slow
def test_only_one_process_may_write_to_a_run(tiny, start):
    config = tiny(steps=100_000, checkpoint_every=1)
    process = start(config)
    wait_for_step(config, 2, process)
    for resume in (True, False):
        with pytest.raises(FolderInUse, match=rf"{config.out} is in use by process {process.pid} on \S+"):
            train.run(config, resume=resume)
    process.kill()
    process.wait()
    done = checkpoint.newest(Path(config.out) / "checkpoints")[1]["step"]
    assert train.run(dataclasses.replace(config, steps=done + 1), resume=True).finished
    assert sorted(losses(config.out)) == list(range(1, done + 2))
    assert not (Path(config.out) / ".lock").exists()


def test_what_a_killed_writer_left_is_removed(tiny):
    config = tiny(steps=2)
    train.run(config)
    left = [Path(config.out) / ("." + "0" * 32 + ".model.safetensors"), Path(config.out) / "checkpoints" / ".partial-9"]
    left[0].write_text("half")
    left[1].mkdir()
    train.run(dataclasses.replace(config, steps=3), resume=True)
    assert not any(path.exists() for path in left)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_tokens": 64}, "batch_tokens cannot change when a run resumes: it was 128 when .* was written, got 64"),
        ({"seed": 1}, "seed cannot change"),
        ({"order": "sequential"}, "order cannot change"),
        ({"document_masks": True}, "document_masks cannot change"),
        ({"steps": 3}, "steps must be at least 4, which the run has reached, got 3"),
    ],
)
def test_settings_that_make_another_run_are_refused(tiny, changes, message):
    config = tiny(steps=4)
    train.run(config)
    with pytest.raises(ValueError, match=message):
        train.run(dataclasses.replace(config, **changes), resume=True)


@pytest.mark.parametrize("name", ["train_length", "tau", "rope_base", "layers"])
def test_an_edited_model_is_refused(tiny, name):
    config = tiny(steps=4)
    train.run(config)
    path = Path(config.out) / "config.json"
    values = json.loads(path.read_text())
    values["train"]["model"][name] *= 2
    path.write_text(json.dumps(values))
    edited, _ = read_config(path.parent)
    with pytest.raises(ValueError, match=f"{name} cannot change when a run resumes"):
        train.run(dataclasses.replace(edited, steps=6), resume=True)


def test_learning_rates_and_lengths_may_change(tiny):
    config = tiny(steps=4)
    train.run(config)
    changed = dataclasses.replace(config, steps=6, lr_matrices=0.001, val_lengths="2x", keep=1)
    assert list(train.run(changed, resume=True).validation) == ["2x"]


def test_a_checkpoint_of_something_else_is_refused(tiny):
    config = tiny(steps=2)
    train.run(config)
    checkpoint.save(Path(config.out) / "checkpoints", 3, {"a": torch.zeros(2)}, {}, keep=3)
    with pytest.raises(ValueError, match=r"step-000003 is not a checkpoint of `scaleinv train`"):
        train.run(config, resume=True)
