import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from builders import write_books
from scaleinv import train
from scaleinv.model import GPTConfig

WORKER = Path(__file__).with_name("worker.py")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """Twenty small documents of text."""
    return write_books(tmp_path / "book")


@pytest.fixture
def tiny(book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., train.TrainConfig]:
    """Makes configurations of runs that take seconds: ``tiny(method="alibi", steps=5)``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(method: str = "scale-invariant-p-rope", **changes: object) -> train.TrainConfig:
        model = GPTConfig(layers=2, width=32, heads=2, method=method, train_length=32)
        config = train.TrainConfig(
            model=model,
            data=str(book),
            out=str(tmp_path / "run"),
            steps=6,
            batch_tokens=128,
            val_every=100,
            val_tokens=1024,
            checkpoint_every=2,
            log_every=1,
            device="cpu",
        )
        return dataclasses.replace(config, **changes)

    return make


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen]:
    """Starts a run in a process of its own, or in several under torchrun; ``fail`` as in worker.py."""
    running = []

    def begin(config: train.TrainConfig, *, resume: bool = False, ranks: int = 1, fail: str = "") -> subprocess.Popen:
        path = tmp_path / f"config-{len(running)}.json"
        path.write_text(json.dumps(config.to_json()))
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += [str(WORKER), str(path)] + ["resume"] * resume + [fail] * bool(fail)
        shown = {**os.environ, "PYTHONFAULTHANDLER": "1"}  # a crash shows its stack
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=shown)
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.wait()
