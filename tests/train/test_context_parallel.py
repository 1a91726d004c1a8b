"""Ranks that share each sequence train the model that one process trains."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from run_files import finish, losses

from scaleinv import train
from scaleinv.eval.loss import evaluate, read_evaluation
from scaleinv.train.logs import read_metrics


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        pytest.param(2, {"document_masks": True}, id="2 ranks, packed documents", marks=pytest.mark.slow),
        pytest.param(3, {"context_layout": "contiguous"}, id="3 ranks, contiguous", marks=pytest.mark.slow),
        pytest.param(4, {"parallel": "fsdp"}, id="2 x 2 ranks, fsdp", marks=pytest.mark.slow),
        pytest.param(4, {"micro_tokens": 32}, id="2 x 2 ranks, ddp, accumulated", marks=pytest.mark.slow),
    ],
)
def test_ten_steps_equal_one_process(tiny, start, tmp_path, ranks, changes):
    method = "scale-invariant-rope" if ranks == 3 else "logn+p-rope"
    alone = tiny(method, out=str(tmp_path / "alone"), steps=10, val_every=5, val_lengths="1x,4x")
    alone.model.train_length = 48  # 2, 3 and 4 divide it
    alone.model.learnable_tau = ranks == 3
    alone = dataclasses.replace(alone, batch_tokens=192, document_masks=changes.get("document_masks", False))
    shared = dataclasses.replace(
        alone, out=str(tmp_path / "shared"), context_parallel=3 if ranks == 3 else 2, **changes
    )
    train.run(alone)
    output = finish(start(shared, ranks=ranks))
    assert f"{shared.context_parallel} per sequence ({shared.context_layout})" in output
    assert losses(shared.out) == pytest.approx(losses(alone.out), rel=1e-5)
    ours, theirs = (read_metrics(Path(folder))[-1]["validation"] for folder in (shared.out, alone.out))
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_gradients_equal_one_process(tmp_path, parallel):
    """Muon and Adam do not see the size of a gradient, so equal losses do not show that it is right.

    The error is at most three times that of one process, both in float32 and against float64, and the roundings of a
    sum over the tokens: one process may be right by chance in a gradient of few elements.
    """
    worker = str(Path(__file__).with_name("gradient_worker.py"))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]

    def gradients(start: list[str], *arguments: str) -> dict[str, torch.Tensor]:
        out = tmp_path / "gradients.pt"
        subprocess.run([sys.executable, *start, worker, str(out), parallel, *arguments], check=True, timeout=300)
        return {name: x.double() for name, x in torch.load(out).items()}

    exact, alone, shared = gradients([], "1", "float64"), gradients([], "1"), gradients(torchrun, "2")
    assert shared.keys() == exact.keys()
    assert any("tau" in name for name in exact)
    rounding = torch.finfo(torch.float32).eps * (4 * 48) ** 0.5
    for name, x in exact.items():
        size = x.abs().max()
        assert size > 0, name
        error, own = ((y[name] - x).abs().max() for y in (shared, alone))
        assert error <= 3 * own + rounding * size, f"{name}: off by {error:.3g} of {size:.3g}, one process {own:.3g}"


@pytest.mark.slow
def test_a_run_moves_between_layouts_and_numbers_of_ranks(tiny, start, tmp_path):
    reference = tiny(out=str(tmp_path / "reference"), steps=8, decay=0.0)
    train.run(reference)
    moving = dataclasses.replace(reference, out=str(tmp_path / "moving"))
    for stop, ranks, layout in ((2, 4, "contiguous"), (4, 1, "zigzag"), (6, 2, "zigzag"), (8, 4, "zigzag")):
        config = dataclasses.replace(moving, steps=stop, context_parallel=ranks, context_layout=layout)
        finish(start(config, ranks=ranks, resume=stop > 2))
    assert losses(moving.out) == pytest.approx(losses(reference.out), rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "length", "shared", "message"),
    [
        pytest.param(1, 32, 2, "context_parallel must divide the number of ranks, got 2 and 1", id="too few ranks"),
        pytest.param(2, 33, 2, "33 tokens do not divide by 2", id="odd length", marks=pytest.mark.slow),
    ],
)
def test_sequences_that_cannot_be_shared_are_refused(tiny, start, ranks, length, shared, message):
    config = tiny()
    config.model.train_length = length
    config = dataclasses.replace(config, batch_tokens=4 * length, context_parallel=shared)
    process = start(config, ranks=ranks)
    output, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert message in output


def test_infini_attention_is_refused_before_anything_is_written(tiny):
    with pytest.raises(ValueError, match="context_parallel must be 1 with Infini-attention"):
        tiny("infini-rope", context_parallel=2)


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "fail"), [("ddp", "killed"), ("fsdp", "raises")])
def test_a_lost_rank_ends_the_others_and_the_run_resumes(tiny, start, tmp_path, parallel, fail):
    whole = tiny(out=str(tmp_path / "whole"))
    train.run(whole)
    config = dataclasses.replace(whole, out=str(tmp_path / "lost"), context_parallel=2, parallel=parallel)
    process = start(config, ranks=4, fail=fail)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    again = f"torchrun --nproc-per-node 4 -m scaleinv train --resume {config.out}"
    assert output.count(f"to continue from the last checkpoint: {again}") == 3, output
    assert ("a mistake on this rank alone" in output) == (fail == "raises")
    resumed = finish(start(dataclasses.replace(config, context_parallel=1), resume=True))
    assert "at step 2" in resumed
    assert losses(config.out) == pytest.approx(losses(whole.out), rel=1e-5)


@pytest.mark.slow
def test_evaluation_over_ranks_equals_one_process(tiny, tmp_path):
    config = tiny(steps=4)
    train.run(config)
    alone = evaluate(config.out, "1x,4x", tokens=1024, device="cpu")[0]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "scaleinv"]
    command += ["evaluate", config.out, "--lengths", "1x,4x", "--tokens", "1024", "--context-parallel", "2"]
    done = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("4x (128 tokens)") == 1  # rank 0 alone reports
    shared = read_evaluation(alone.path(Path(config.out) / "evaluations"))
    with pytest.raises(ValueError, match="context_parallel must be 1 with a tolerance"):
        evaluate(config.out, "1x", tokens=1024, device="cpu", tolerance=0.1, context_parallel=2)
    for label, found in alone.lengths.items():
        assert shared.lengths[label].mean == pytest.approx(found.mean, rel=1e-5)
        assert shared.lengths[label].positions == [pytest.approx(x, rel=1e-4) for x in found.positions]
