"""Nothing is lost: runs are killed for real, and go on as if they had not been."""

import dataclasses
import json
import logging
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from run_files import finish, losses
from safetensors.torch import load_file

from scaleinv import train
from scaleinv.train import checkpoint
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


def test_partial_checkpoint_is_not_mistaken_for_one(tiny):
    config = tiny(steps=4)
    train.run(config)
    folder = Path(config.out) / "checkpoints"
    (folder / ".partial-000099").mkdir()
    assert checkpoint.newest(folder)[1]["step"] == 4
    train.run(dataclasses.replace(config, steps=5), resume=True)
    assert not list(folder.glob(".partial-*"))


def test_last_k_checkpoints_are_kept(tiny):
    config = tiny(steps=10, keep=2)
    train.run(config)
    assert sorted(p.name for p in (Path(config.out) / "checkpoints").iterdir()) == ["step-000008", "step-000010"]


def test_changed_data_is_refused(tiny, book):
    config = tiny(steps=4)
    train.run(config)
    for path in book.iterdir():
        path.write_text(path.read_text().replace("fox", "cat"))
    with pytest.raises(ValueError, match="data has changed"):
        train.run(dataclasses.replace(config, steps=6), resume=True)


def test_full_disk_is_a_clear_error(tiny, monkeypatch):
    config = tiny(steps=4)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.dcp, "save", full)
    with pytest.raises(checkpoint.CheckpointError, match=r"step 2 could not be written to .*No space left on device"):
        train.run(config)
    assert not list((Path(config.out) / "checkpoints").glob("*"))


def test_checkpoints_hold_no_pickle(tiny):
    config = tiny(steps=2)
    train.run(config)
    kinds = {path.suffix for path in Path(config.out).rglob("*") if path.is_file() and "tensorboard" not in str(path)}
    assert kinds <= {".json", ".jsonl", ".safetensors"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_weights_on_a_full_disk(tiny, monkeypatch):
    from scaleinv.train import store

    def full(weights, path, metadata=None):
        with open("/dev/full", "wb") as stream:
            stream.write(b"x" * 100_000)

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(checkpoint.CheckpointError, match="weights could not be written"):
        train.run(tiny(steps=2))
    assert store.WEIGHTS == "model.safetensors"
