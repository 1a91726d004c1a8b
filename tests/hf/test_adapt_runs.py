"""`scaleinv adapt` in processes of its own: killed at any moment and resumed, and on two ranks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hf_folders import model_folder, text_folder
from scaleinv.cli import main
from scaleinv.eval.loss import read_evaluation
from scaleinv.files import locked, read_lines
from scaleinv.hf.adapt.training import newest, remove_unfinished

pytestmark = pytest.mark.slow
NAME = "scale-invariant-fitted-seed0"
WORKER = str(Path(__file__).with_name("adapt_worker.py"))
RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command but for its folder: 12 steps, a checkpoint after each."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model, data = model_folder(tmp_path / "model", attention_dropout=0.1), text_folder(tmp_path / "text")
    size = "--tokens 3072 --batch-tokens 256 --micro-tokens 64 --train-length 32 --val-tokens 512 --lengths 1x,4x"
    some = "--variants scale-invariant-fitted,scale-invariant-fitted+yarn --lr 0.01"
    rest = "--checkpoint-every 1 --no-report --device cpu"
    return ["-m", "scaleinv", "adapt", str(model), "--data", str(data), *f"{size} {some} {rest}".split()]


def run(words: list[str], out: Path) -> None:
    subprocess.run([sys.executable, *words, "--out", str(out)], check=True, capture_output=True, timeout=300)


@pytest.mark.parametrize(
    ("extra", "kills"),
    [
        ((), (3, 8)),
        (("--lora", "2"), (5,)),
        (("--distill", "--variants", "scale-invariant-p-rope"), (5,)),
    ],
    ids=["weights", "lora", "distilled"],
)
def test_killed_runs_resume_bit_for_bit(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: tuple, kills: tuple
) -> None:
    """Weights, losses of every step and evaluations are those of a run that nobody disturbed; with dropout."""
    if "--lora" in extra:
        pytest.importorskip("peft")
    words += extra
    names = extra[-1:] if "--variants" in extra else ("scale-invariant-fitted", "scale-invariant-fitted+yarn")
    folder = f"{names[0]}-seed0"
    run(words, tmp_path / "whole")
    out = tmp_path / "killed"
    for wanted in kills:  # after different steps
        monkeypatch.setenv("DIE_AT", str(wanted))
        with pytest.raises(subprocess.CalledProcessError) as died:
            run([WORKER, *words[2:]], out)
        assert died.value.returncode == -signal.SIGKILL
        last = newest(out / "checkpoints" / folder)
        assert (last and last.name) == (f"checkpoint-{wanted}" if wanted else None)
    assert not (out / "models" / folder).exists()
    run(words, out)
    expected, got = (load_file(x / "models" / folder / "model.safetensors") for x in (tmp_path / "whole", out))
    assert all((got[name] == x).all() for name, x in expected.items())
    for name in names:
        both = [read_evaluation(x / "evaluations" / f"{name}-seed0.json") for x in (tmp_path / "whole", out)]
        assert both[0] == both[1]
    lines = [read_lines(x / "curves" / f"{folder}.jsonl") for x in (tmp_path / "whole", out)]
    steps = [[(line["step"], line["loss"]) for line in curve] for curve in lines]
    assert len(steps[0]) == 12
    assert steps[0] == steps[1]
    assert not (out / "checkpoints").exists()


def test_half_written_checkpoints_are_not_used(tmp_path: Path) -> None:
    for step, state in ((1, '{"global_step": 1}'), (2, '{"global_step": 2'), (3, None), (4, '{"global_step": 3}')):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        for name in ("optimizer.pt", "scheduler.pt"):
            (folder / name).touch()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    for step, lost in ((5, "optimizer.pt"), (6, "scheduler.pt")):
        folder = shutil.copytree(tmp_path / "checkpoint-1", tmp_path / f"checkpoint-{step}")
        (folder / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
        (folder / lost).unlink()
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


def assert_same_models(folder: Path, name: str = NAME) -> None:
    """The runs "one" and "two" trained the same model, but for rounding."""
    one, two = (load_file(folder / x / "models" / name / "model.safetensors") for x in ("one", "two"))
    start = load_file(folder / "without-dropout" / "model.safetensors")
    assert one.keys() == two.keys()
    moved = max((one[name] - x).abs().max().item() for name, x in start.items())
    apart = max((one[name] - x).abs().max().item() for name, x in two.items())
    assert apart < 1e-3 * moved


@pytest.mark.parametrize(
    "extra",
    [(), ("--distill", "--variants", "stock,scale-invariant-fitted")],
    ids=["text", "distill"],
)
def test_two_ranks_are_one(words: list[str], tmp_path: Path, extra: tuple[str, ...]) -> None:
    """The same windows in each step: the same models but for the order of sums, also one after another."""
    words[3] = str(model_folder(tmp_path / "without-dropout"))
    run([*words, *extra], tmp_path / "one")
    run([*RANKS, *words, *extra], tmp_path / "two")
    names = extra[-1].split(",") if "--variants" in extra else ["scale-invariant-fitted", "scale-invariant-fitted+yarn"]
    for name in names:
        assert_same_models(tmp_path, f"{name}-seed0")
        both = [read_evaluation(tmp_path / x / "evaluations" / f"{name}-seed0.json") for x in ("one", "two")]
        for label in ("1x", "4x"):
            assert both[1].lengths[label].losses == pytest.approx(both[0].lengths[label].losses, abs=1e-4)


def test_sharded_ranks_are_one(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 over two ranks, killed and resumed: the folder holds all weights of the model that one rank trains."""
    words[3] = str(model_folder(tmp_path / "without-dropout", tie_word_embeddings=True))
    words += ["--variants", "scale-invariant-fitted", "--lengths", "1x"]
    assert main([*words[2:], "--out", str(tmp_path / "one")]) == 0
    sharded = [*RANKS, WORKER, *words[2:], "--fsdp"]
    monkeypatch.setenv("DIE_AT", "5")
    with pytest.raises(subprocess.CalledProcessError):
        run(sharded, tmp_path / "two")
    assert newest(tmp_path / "two" / "checkpoints" / NAME) == tmp_path / "two" / "checkpoints" / NAME / "checkpoint-5"
    monkeypatch.delenv("DIE_AT")
    run(sharded, tmp_path / "two")
    assert_same_models(tmp_path)
