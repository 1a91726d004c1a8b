"""`scaleinv adapt` in processes of its own: killed at any moment and resumed, and on two ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hf_folders import model_folder, text_folder
from scaleinv.eval.loss import read_evaluation
from scaleinv.files import locked, read_lines
from scaleinv.hf.adapt.training import newest, remove_unfinished

pytestmark = pytest.mark.slow
NAME = "scale-invariant-seed0"


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command but for its folder: 12 steps, a checkpoint after each."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model, data = model_folder(tmp_path / "model", attention_dropout=0.1), text_folder(tmp_path / "text")
    size = "--tokens 3072 --batch-tokens 256 --micro-tokens 64 --train-length 32 --val-tokens 512 --lengths 1x,4x"
    some = "--variants scale-invariant,scale-invariant+yarn --checkpoint-every 1 --no-report --lr 0.01 --device cpu"
    return ["-m", "scaleinv", "adapt", str(model), "--data", str(data), *size.split(), *some.split()]


def run(words: list[str], out: Path) -> None:
    subprocess.run([sys.executable, *words, "--out", str(out)], check=True, capture_output=True, timeout=300)


@pytest.mark.parametrize(
    ("extra", "kills"),
    [((), (3, 8)), (("--lora", "2"), (5,)), (("--anneal", "0.6", "--distill"), (5,))],
    ids=["weights", "lora", "annealed"],
)
def test_killed_runs_resume_bit_for_bit(words: list[str], tmp_path: Path, extra: tuple, kills: tuple) -> None:
    """Weights, losses of every step and evaluations are those of a run that nobody disturbed; with dropout."""
    if "--lora" in extra:
        pytest.importorskip("peft")
    words += extra
    run(words, tmp_path / "whole")
    out = tmp_path / "killed"
    for wanted in kills:  # after different steps
        process = subprocess.Popen([sys.executable, *words, "--out", str(out)], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 200
        while newest(out / "checkpoints" / NAME) is None or _step(out) < wanted:
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (out / "models" / NAME).exists()
    run(words, out)
    expected, got = (load_file(x / "models" / NAME / "model.safetensors") for x in (tmp_path / "whole", out))
    assert all((got[name] == x).all() for name, x in expected.items())
    for name in ("scale-invariant", "scale-invariant+yarn"):
        both = [read_evaluation(x / "evaluations" / f"{name}-seed0.json") for x in (tmp_path / "whole", out)]
        assert both[0] == both[1]
    lines = [read_lines(x / "curves" / f"{NAME}.jsonl") for x in (tmp_path / "whole", out)]
    steps = [[(line["step"], line["loss"]) for line in curve] for curve in lines]
    assert len(steps[0]) == 12
    assert steps[0] == steps[1]
    assert not (out / "checkpoints").exists()


def _step(out: Path) -> int:
    last = newest(out / "checkpoints" / NAME)
    return 0 if last is None else int(last.name.rpartition("-")[2])


def test_half_written_checkpoints_are_not_used(tmp_path: Path) -> None:
    for step, state in ((1, '{"global_step": 1}'), (2, '{"global_step": 2'), (3, None), (4, '{"global_step": 3}')):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    assert newest(tmp_path) == tmp_path / "checkpoint-1"
    remove_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert newest(tmp_path / "none") is None


def test_one_folder_has_one_writer(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with locked(out):
        ran = subprocess.run([sys.executable, *words, "--out", str(out)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 2
    assert f"is in use by process {os.getpid()}" in ran.stderr
    assert not (out / "models").exists()


@pytest.mark.parametrize("extra", [(), ("--distill",)], ids=["text", "distill"])
def test_two_ranks_are_one(words: list[str], tmp_path: Path, extra: tuple[str, ...]) -> None:
    """The same windows in each step: the same model but for the order of sums."""
    words[3] = str(model_folder(tmp_path / "without-dropout"))
    run([*words, *extra], tmp_path / "one")
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run([*ranks, *words, *extra], tmp_path / "two")
    one, two = (load_file(tmp_path / x / "models" / NAME / "model.safetensors") for x in ("one", "two"))
    start = load_file(tmp_path / "without-dropout" / "model.safetensors")
    moved = max((one[name] - x).abs().max().item() for name, x in start.items())
    apart = max((one[name] - x).abs().max().item() for name, x in two.items())
    assert apart < 1e-3 * moved
    for name in ("scale-invariant", "scale-invariant+yarn"):
        both = [read_evaluation(tmp_path / x / "evaluations" / f"{name}-seed0.json") for x in ("one", "two")]
        for label in ("1x", "4x"):
            assert both[1].lengths[label].losses == pytest.approx(both[0].lengths[label].losses, abs=1e-4)
