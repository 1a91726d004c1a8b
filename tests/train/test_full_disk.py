"""A full disk: one line, nothing half written left, and the run goes on when there is room again."""

import contextlib
import dataclasses
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
from run_files import losses

from scaleinv import train
from scaleinv.cli import main
from scaleinv.train import checkpoint, store


@contextlib.contextmanager
def largest_file(size: int):
    """Inside, a write past ``size`` bytes of a file fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def disk(tmp_path):
    """A disk of its own, and a function that gives it a size in bytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    made = mount and subprocess.run([mount, "-t", "tmpfs", "-o", "size=4m", "none", folder], capture_output=True)
    if not made or made.returncode:
        pytest.skip("a file system cannot be mounted here")

    def resize(size: int) -> None:
        subprocess.run([mount, "-o", f"remount,size={size}", folder], check=True)

    yield folder, resize
    subprocess.run(["umount", "-l", folder], check=True)


def used(folder: Path) -> int:
    return shutil.disk_usage(folder).used


def left_behind(out: Path) -> list[Path]:
    """Half-written files and folders."""
    return [*out.glob(".*"), *(out / store.CHECKPOINTS).glob(".*")]


def test_a_checkpoint_that_cannot_be_written(tiny, tmp_path, capfd):
    whole = tiny(steps=4, out=str(tmp_path / "whole"), decay=0.0)
    train.run(whole)
    config = dataclasses.replace(whole, steps=2, out=str(tmp_path / "run"))
    train.run(config)
    out = Path(config.out)
    capfd.readouterr()
    with largest_file(50_000):
        assert main(["train", "--resume", config.out, "--steps", "4"]) == 2
    error = capfd.readouterr().err.strip().splitlines()
    assert len(error) == 1, error
    assert error[0].startswith(f"scaleinv: error: checkpoint of step 4 could not be written to {out}/checkpoints: ")
    assert "File too large" in error[0]
    assert left_behind(out) == []
    assert checkpoint.newest(out / store.CHECKPOINTS)[1]["step"] == 2
    assert store.weights_step(out) == 2
    assert main(["train", "--resume", config.out, "--steps", "4"]) == 0
    assert losses(out) == losses(whole.out)


@pytest.mark.slow
@pytest.mark.parametrize("room", [0, 60_000, 450_000], ids=lambda room: f"{room // 1000}kB")
def test_a_disk_that_is_full(tiny, tmp_path, disk, capfd, room):
    """With no room, room for a part of a checkpoint, or for all of it but not for the weights."""
    folder, resize = disk
    whole = tiny(steps=4, out=str(tmp_path / "whole"), decay=0.0)
    train.run(whole)
    config = dataclasses.replace(whole, steps=2, out=str(folder / "run"))
    train.run(config)
    out = Path(config.out)
    resize(used(folder) + room)
    capfd.readouterr()
    assert main(["train", "--resume", config.out, "--steps", "4"]) == 2
    error = capfd.readouterr().err.strip().splitlines()
    assert len(error) == 1, error
    assert error[0].startswith("scaleinv: error: ")
    assert "No space left on device" in error[0]
    assert str(out) in error[0]
    assert left_behind(out) == []
    assert checkpoint.newest(out / store.CHECKPOINTS)[1]["step"] == (4 if room == 450_000 else 2)
    assert store.weights_step(out) == 2
    resize(4 << 20)
    assert main(["train", "--resume", config.out, "--steps", "4"]) == 0
    assert losses(out) == losses(whole.out)
    assert store.weights_step(out) == 4
