"""What a run's folder holds, and what is said where it is damaged."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scaleinv import train
from scaleinv.train import checkpoint, store


@pytest.fixture
def run(tiny) -> Path:
    config = tiny(steps=2)
    train.run(config)
    return Path(config.out)


def change(path: Path, **values: object) -> None:
    """Change settings in config.json."""
    content = json.loads(path.read_text())
    content["train"].update(values)
    path.write_text(json.dumps(content))


def test_tensor_hash_knows_names_types_shapes_and_values():
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.tensor(1.0)}
    digest = store.tensor_hash(tensors)
    assert digest == store.tensor_hash(dict(reversed(tensors.items())))
    assert digest == store.tensor_hash({**tensors, "a": tensors["a"].T.contiguous().T})
    others = [
        {**tensors, "a": tensors["a"].reshape(3, 2)},
        {**tensors, "a": tensors["a"].to(torch.float64)},
        {**tensors, "a": -tensors["a"]},
        {"a": tensors["a"], "b": tensors["b"], "d": tensors["c"]},
        {"a": tensors["a"], "b": tensors["b"]},
    ]
    assert len({digest, *(store.tensor_hash(other) for other in others)}) == 1 + len(others)


def test_digest_is_that_of_the_tensors_and_the_same_in_every_run(tiny, tmp_path, run):
    train.run(tiny(steps=2, out=str(tmp_path / "again")))
    assert store.weights_digest(run) == store.weights_digest(tmp_path / "again")
    assert store.weights_digest(run) == store.tensor_hash(load_file(run / store.WEIGHTS))
    train.run(tiny(steps=2, seed=1, out=str(tmp_path / "other")))
    assert store.weights_digest(run) != store.weights_digest(tmp_path / "other")


def test_a_run_from_before_the_hash_still_loads(run):
    weights = {name: value.clone() for name, value in load_file(run / store.WEIGHTS).items()}
    digest = store.weights_digest(run)
    save_file(weights, run / store.WEIGHTS, metadata={"format": "pt", "step": "2"})
    model, _ = store.load_model(run)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert (store.weights_step(run), store.weights_digest(run)) == (2, digest)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def delete(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [cut, flip, empty, delete])
def test_damaged_weights_are_named_and_resume_writes_them_anew(tiny, run, damage):
    before = {name: value.clone() for name, value in load_file(run / store.WEIGHTS).items()}
    damage(run / store.WEIGHTS)
    told = rf"{run}/model.safetensors is .*; `scaleinv train --resume {run}` writes it"
    for read in (store.load_model, store.weights_digest, store.read_weights):
        with pytest.raises(ValueError, match=told) as caught:
            read(run)
        assert "\n" not in str(caught.value)
    assert store.weights_step(run) is None
    train.run(tiny(steps=2), resume=True)
    after = load_file(run / store.WEIGHTS)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert store.weights_step(run) == 2


def test_weights_of_another_shape_are_named(tiny, tmp_path, run):
    other = tiny(steps=1, out=str(tmp_path / "other"), model=train.TrainConfig().model.__class__(
        layers=2, width=64, heads=2, train_length=32
    ))  # fmt: skip
    train.run(other)
    shutil.copy(Path(other.out) / store.WEIGHTS, run / store.WEIGHTS)
    told = r"model.safetensors does not fit config.json: \S+ has shape \[64.*\], and \[32.*\] is needed"
    with pytest.raises(ValueError, match=told):
        store.load_model(run)
    weights = load_file(Path(other.out) / store.WEIGHTS)
    weights["extra"] = weights.pop("output.weight")
    save_file(weights, run / store.WEIGHTS)
    with pytest.raises(ValueError, match=r"model.safetensors does not fit config.json"):
        store.load_model(run)


def test_weights_on_a_full_disk_leave_the_old_ones(run, monkeypatch):
    from safetensors import SafetensorError

    before = store.weights_digest(run)

    def full(weights, path, metadata=None):
        Path(path).write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    told = r"weights could not be written to .*model.safetensors: .*No space left on device"
    with pytest.raises(checkpoint.CheckpointError, match=told):
        store.write_weights(run, {"a": torch.zeros(3)}, 3)
    assert store.weights_digest(run) == before
    assert not list(run.glob(".*"))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"train": 3, "corpus": {}}',
        '{"train": {}, "corpus": {}}',
        '{"train": {"model": 3}, "corpus": {}}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_config_is_named(run, content):
    (run / store.CONFIG).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"^{run / store.CONFIG} ") as caught:
        store.load_model(run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"steps": "6"},
        {"steps": None},
        {"seed": 1.5},
        {"betas": 3},
        {"betas": ["a", "b"]},
        {"val_lengths": 4},
        {"val_multiples": 4},
        {"data": ["a"]},
        {"unknown": 1},
        {"lr_output": "fast"},
    ],
    ids=str,
)
def test_settings_of_a_wrong_type_are_named(run, values):
    change(run / store.CONFIG, **values)
    with pytest.raises(ValueError, match=rf"^{run / store.CONFIG} .*") as caught:
        store.read_config(run)
    assert next(iter(values)).removeprefix("val_") in str(caught.value)


def test_a_config_from_before_val_lengths_is_read(run):
    config, values = store.read_config(run)
    del values["train"]["val_lengths"]
    values["train"]["val_multiples"] = [1, 4, 16]
    (run / store.CONFIG).write_text(json.dumps(values))
    assert store.read_config(run)[0] == config


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(ValueError, match=rf"{tmp_path} holds no run: there is no config.json in it"):
        store.read_config(tmp_path)


def test_weights_of_a_checkpoint(tiny, run):
    train.run(tiny(steps=4), resume=True)
    first, last = (store.load_model(run, step=step)[0].state_dict() for step in (2, 4))
    newest = store.load_model(run)[0].state_dict()
    assert all(torch.equal(last[name], newest[name]) for name in newest)
    assert any(not torch.equal(first[name], last[name]) for name in newest)
