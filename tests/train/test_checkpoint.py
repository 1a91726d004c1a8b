"""Checkpoints: whole or not there, checked when read, and the last good one never goes."""

import json
import logging
from pathlib import Path

import pytest
import torch

from scaleinv.train import checkpoint


def tensors(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 4), value), "b": torch.full((), value), "n": torch.arange(5)}


def save(folder: Path, step: int, keep: int = 3) -> Path:
    return checkpoint.save(folder, step, tensors(step), {"corpus": "c"}, keep)


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


def flip(path: Path) -> None:
    """Change the last bit of a checkpoint's tensors."""
    file = next(path.glob("*.safetensors"))
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_what_is_saved_is_loaded(tmp_path):
    save(tmp_path, 7)
    path, manifest = checkpoint.newest(tmp_path)
    assert (manifest["step"], manifest["extra"]) == (7, {"corpus": "c"})
    found = tensors()
    checkpoint.load(path, found)
    assert all(torch.equal(found[name], value) for name, value in tensors(7).items())
    assert checkpoint.of_step(tmp_path, 7) == path


def test_a_step_without_a_checkpoint_names_those_there_are(tmp_path):
    save(tmp_path, 2)
    save(tmp_path, 10)
    with pytest.raises(ValueError, match=r"step 3 has no checkpoint in .*: there are 2, 10"):
        checkpoint.of_step(tmp_path, 3)


def test_other_shapes_do_not_fit(tmp_path):
    path = save(tmp_path, 1)
    with pytest.raises(checkpoint.CheckpointError, match=r"step-000001 does not fit this run: .*") as caught:
        checkpoint.load(path, {"a": torch.zeros(9, 4)})
    assert "\n" not in str(caught.value)


def test_the_newest_are_kept(tmp_path):
    for step in (2, 4, 6, 8):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == [6, 8]


@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_checkpoints_do_not_count(tmp_path, keep):
    """A run that goes back behind a damaged checkpoint keeps what it writes, not the damaged one."""
    flip(save(tmp_path, 12))
    save(tmp_path, 6, keep)
    assert checkpoint.newest(tmp_path)[1]["step"] == 6
    save(tmp_path, 8, keep)
    assert checkpoint.newest(tmp_path)[1]["step"] == 8
    assert steps(tmp_path) == ([8] if keep == 1 else [6, 8])


def test_nothing_is_deleted_while_too_few_are_whole(tmp_path):
    flip(save(tmp_path, 2))
    flip(save(tmp_path, 4))
    save(tmp_path, 6, keep=2)
    assert steps(tmp_path) == [2, 4, 6]
    save(tmp_path, 8, keep=2)
    assert steps(tmp_path) == [6, 8]


def test_a_checkpoint_that_comes_out_damaged_deletes_no_other(tmp_path, monkeypatch):
    save(tmp_path, 2, keep=1)
    replace = checkpoint.os.replace

    def damage(source, target):
        replace(source, target)
        if Path(target).name == "step-000004":
            flip(Path(target))

    monkeypatch.setattr(checkpoint.os, "replace", damage)
    with pytest.raises(checkpoint.CheckpointError, match=r"step 4 could not be written .* was changed or cut short"):
        save(tmp_path, 4, keep=1)
    assert steps(tmp_path) == [2, 4]
    assert checkpoint.newest(tmp_path)[1]["step"] == 2


def test_a_damaged_checkpoint_is_written_again(tmp_path):
    flip(save(tmp_path, 2))
    save(tmp_path, 2)
    assert checkpoint.newest(tmp_path)[1]["step"] == 2
    assert steps(tmp_path) == [2]


@pytest.mark.parametrize(
    "manifest",
    [
        "{",
        "[]",
        "{}",
        '{"step": "1", "extra": {}, "files": {}}',
        '{"step": 1, "extra": 0, "files": {}}',
        '{"step": 1, "extra": {}, "files": []}',
        '{"step": 1, "extra": {}, "files": {}}',
        '{"step": 9, "extra": {}, "files": {}}',
        '{"step": 1, "extra": {}, "files": {"nothing.safetensors": 5}}',
        b"\xff\xfe",
    ],
)
def test_any_damage_of_the_manifest_is_reported(tmp_path, manifest, caplog):
    path = save(tmp_path, 1) / "manifest.json"
    path.write_bytes(manifest if isinstance(manifest, bytes) else manifest.encode())
    with caplog.at_level(logging.WARNING):
        assert checkpoint.newest(tmp_path) is None
    assert f"checkpoint {path.parent} is damaged: " in caplog.text
    with pytest.raises(checkpoint.CheckpointError, match="is damaged"):
        checkpoint.of_step(tmp_path, 1)


def test_what_a_killed_run_has_half_deleted_is_no_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 2)

    def killed(path, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.delete_old(tmp_path, 0)
    assert checkpoint.newest(tmp_path) is None
    checkpoint.remove_partial(tmp_path)
    assert not any(tmp_path.iterdir())


def test_partial_checkpoints_are_not_mistaken_for_whole_ones(tmp_path):
    save(tmp_path, 4)
    (tmp_path / ".partial-000099").mkdir()
    assert checkpoint.newest(tmp_path)[1]["step"] == 4
    save(tmp_path, 5)
    assert steps(tmp_path) == [4, 5]


@pytest.mark.parametrize(
    "problem",
    [
        OSError(28, "No space left on device"),
        checkpoint.dcp.CheckpointException("ranks", {0: (OSError(28, "No space left on device"), None)}),
    ],
    ids=lambda problem: type(problem).__name__,
)
def test_a_failed_write_is_one_line_and_leaves_the_last_one(tmp_path, monkeypatch, problem):
    save(tmp_path, 2)

    def fail(tensors, storage_writer, no_dist):
        (tmp_path / ".partial-000004" / "half").write_text("half")
        raise problem

    monkeypatch.setattr(checkpoint.dcp, "save", fail)
    told = r"checkpoint of step 4 could not be written to .*: .*No space left on device$"
    with pytest.raises(checkpoint.CheckpointError, match=told) as caught:
        save(tmp_path, 4)
    assert "\n" not in str(caught.value)
    assert steps(tmp_path) == [2]
    assert checkpoint.newest(tmp_path)[1]["step"] == 2


def test_no_pickle(tmp_path):
    assert {file.suffix for file in save(tmp_path, 1).iterdir()} == {".json", ".safetensors"}
    json.loads((tmp_path / "step-000001" / "manifest.json").read_text())
