"""A small folder of everything that the program reads, made once, and a fresh copy of it for each case."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from builders import write_books
from hf_folders import model_folder
from scaleinv.analysis import model_statistics
from scaleinv.analysis.calibrate import calibrate
from scaleinv.cli import main
from scaleinv.cli.program import explanation
from scaleinv.eval import worker
from scaleinv.eval.workers import Workers
from scaleinv.train.store import load_model

LIMIT = 20
"""Seconds that a case may take; most take a few hundredths."""
TINY = "--train-length 96 --layers 1 --width 32 --batch-tokens 192 --val-tokens 384 --val-lengths 1x --device cpu"
COMPARE = (
    f"compare {TINY} --methods rope,yarn --seeds 1 --sweep tau=1 --lengths 1x,2x --tokens 384 --steps 2 --data books "
    "--out results --no-report"
)
NEEDLE = (
    "needle results/runs/rope-seed0 --out results --lengths 1x --samples 2 --needles 1 --digits 1 --cities 3 --steps 1"
)
TOML = """steps = 2
train-length = 96
layers = 1
width = 32
batch-tokens = 192
val-lengths = "1x"
betas = [0.9, 0.95]
document-masks = false
data = "books"
"""


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code, and what it printed."""

    code: int
    out: str
    err: str


class TooLong(BaseException):
    """A case ran into the time limit. No program catches it."""


def outcome(command: str | list[str] | Callable[[], object], limit: float = LIMIT) -> Outcome:
    """Run a command of the program, or a call of the library with its errors shown as the program shows them."""

    def stop(number: int, frame: object) -> None:
        raise TooLong(f"no end after {limit} s")

    out, err = io.StringIO(), io.StringIO()
    faulthandler.dump_traceback_later(3 * limit, exit=True)  # for what hangs outside of Python
    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = (
                _call(command) if callable(command) else main(command.split() if isinstance(command, str) else command)
            )
    except SystemExit as left:  # --help
        code = int(left.code or 0)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    return Outcome(code, out.getvalue(), err.getvalue())


def _call(function: Callable[[], object]) -> int:
    try:
        print(function())
        return 0
    except Exception as error:
        line = explanation(error)
        if line is None:
            raise
        print("scaleinv: error:", " ".join(line.split()), file=sys.stderr)
        return 2


def assert_clear(found: Outcome, *names: str) -> None:
    """It worked, or one line says what is wrong and has one of the names in it."""
    assert found.code in (0, 2), found
    assert "Traceback" not in found.err, found.err
    errors = [line for line in found.err.split("\n") if line.startswith("scaleinv: error: ")]
    assert len(errors) == (found.code == 2), found.err
    if found.code == 2:
        assert found.err.rstrip("\n").endswith(errors[0]), found.err
        assert not names or any(name in errors[0] for name in names), (names, errors[0])


def tree(folder: Path) -> dict[str, bytes | str]:
    """Every file below a folder by name: its bytes, or what else it is."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        name = str(path.relative_to(folder))
        found[name] = path.read_bytes() if stat.S_ISREG(mode) else stat.filemode(mode)
    return found


def changed(before: dict[str, bytes | str], after: dict[str, bytes | str]) -> set[str]:
    """The files and folders that differ, are new or are gone."""
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


class World:
    """The folder ``here``, which the working directory is in, and the pristine copy that `reset` brings back."""

    def __init__(self, folder: Path) -> None:
        self.here, self.pristine = folder / "world", folder / "pristine"
        self.here.mkdir()
        with self.inside():
            _make(self.here)
        shutil.copytree(self.here, self.pristine)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """With the working directory and the cache in the world, and comparisons in this process."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.here)
            patch.setenv("XDG_CACHE_HOME", str(self.here / "cache"))
            patch.setenv("HF_HUB_OFFLINE", "1")
            patch.setattr(Workers, "run", _run_here)
            patch.setattr(os, "fsync", lambda handle: None)  # nobody pulls the plug here
            yield

    def reset(self) -> dict[str, bytes | str]:
        """Make everything as it was; returns what there is."""
        for path in self.here.iterdir():  # the folder itself stays: it is the working directory
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        shutil.copytree(self.pristine, self.here, symlinks=True, dirs_exist_ok=True)
        return tree(self.here)


def _run_here(self: Workers, work: worker.Work, receive: Callable[[dict], None]) -> None:
    worker.do(work, receive)


def _make(here: Path) -> None:
    write_books(here / "books", range(12), lines=15)
    (here / "run.toml").write_text(TOML)
    train = f"train {TINY} --method rope --steps 2 --checkpoint-every 1 --data books"
    for command in (
        f"{train} --out run",
        f"{train} --tokenizer bpe:300 --out bpe",
        "evaluate run --lengths 1x --tokens 384",
        "prepare --text books --tokenizer bytes --workers 1 --out shards --val-fraction 0.2",
        COMPARE,
        NEEDLE,
    ):
        found = outcome(command, limit=300)
        assert found.code == 0, found.err
    model_folder(here / "llama")
    model, _ = load_model(here / "run")
    tokens = torch.arange(256) % 200
    calibrate(model, tokens, 64).save(here / "calibration.json")
    model_statistics(model, tokens, [32, 64], name="run", windows=2, queries=8, recent=8).save(here / "statistics")
    for folder in here.rglob("tensorboard"):
        shutil.rmtree(folder)
