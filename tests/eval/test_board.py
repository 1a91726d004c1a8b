import dataclasses

import pytest

from scaleinv.eval import board as module
from scaleinv.eval.board import Board, forward_cost
from scaleinv.eval.compare import todo
from scaleinv.model import GPTConfig


@pytest.fixture
def now(monkeypatch):
    time = {"now": 0.0}
    monkeypatch.setattr(module.time, "monotonic", lambda: time["now"])
    return time


def step(number: int, loss: float = 2.0) -> dict:
    return {"kind": "step", "step": number, "steps": 100, "loss": loss}


def windows(done: int, method: str = "rope") -> dict:
    return {"kind": "windows", "method": method, "length": "1x", "done": done, "total": 4}


@pytest.fixture
def models(plan):
    """Two models with two methods each, 100 steps of 64 tokens, 1,024 tokens at 1x and 4x."""
    plan = dataclasses.replace(plan, train={**plan.train, "steps": 100, "batch_tokens": 64})
    return {job.name: todo(plan, job, plan.tokens) for job in plan.all_jobs()}


@pytest.fixture
def evaluations(plan) -> float:
    """How many steps one model's evaluations cost."""
    config = plan.config(plan.all_jobs()[0]).model
    once, four = (forward_cost(config, times * config.train_length) for times in (1, 4))
    return 2 * 1024 * (once + four) / (3 * 64 * once)


def test_a_forward_pass_costs_weights_and_attention():
    config = GPTConfig(layers=2, width=8, heads=1, vocab_size=10)
    assert forward_cost(config, 100) == 2 * (4 + 8) * 8 * 8 + 10 * 8 + 2 * 8 * 100


def test_one_line_tells_every_model_and_the_time_left(models, evaluations, now):
    lines = []
    board = Board(models, lines.append)
    board.receive("rope-seed0", step(10))
    assert lines[-1] == "0 of 2 models: rope-seed0 step 10/100 loss 2.000"
    now["now"] = 10
    board.receive("rope-seed0", step(20, 1.5))  # 10 steps took 10 s; 80 and 100 are left
    assert lines[-1].record["seconds_left"] == pytest.approx(80 + 100 + 2 * evaluations)
    board.receive("rope-seed1", step(10))
    assert lines[-1].endswith("rope-seed0 step 20/100 loss 1.500 | rope-seed1 step 10/100 loss 2.000")
    assert all(line.passing for line in lines)


def test_the_losses_of_a_finished_model_stay(models, now):
    job = "rope-seed0"
    lines = []
    board = Board({job: models[job]}, lines.append)
    board.receive(job, {"kind": "line", "text": "resuming"})
    assert lines == []
    board.receive(job, windows(4))
    board.receive(job, {"kind": "evaluated", "method": "rope", "length": "1x", "mean": 1.5, "stderr": 0.25})
    board.receive(job, {"kind": "evaluated", "method": "yarn", "length": "1x", "mean": 2.5, "stderr": None})
    assert all(line.passing for line in lines)
    board.finish(job)
    now["now"] = 65
    board.close()
    assert lines[-2:] == ["rope-seed0: rope at 1x 1.5000, yarn at 1x 2.5000", "1 of 1 models in 1:05"]


def test_what_was_done_before_does_not_count_as_speed(models, evaluations, now):
    jobs = list(models)
    lines = []
    board = Board(models, lines.append)
    board.finish(jobs[0])  # was there already
    now["now"] = 5
    board.receive(jobs[1], step(90))
    assert lines[-1].record["seconds_left"] is None
    assert lines[-1].startswith("1 of 2 models: ")
    now["now"] = 10
    board.receive(jobs[1], step(95))
    assert lines[-1].record["seconds_left"] == pytest.approx(5 + evaluations)


def test_needles_are_work_too(models, now):
    lines = []
    board = Board({"a": models["rope-seed0"]}, lines.append)
    asked = {"kind": "samples", "method": "rope", "length": "1x", "done": 2, "total": 4}
    board.receive("a", asked)
    assert lines[-1] == "0 of 1 models: a rope at 1x: 2/4 samples"
    now["now"] = 1
    board.receive("a", {**asked, "done": 3})
    once, four, *_ = models["rope-seed0"].passes
    assert lines[-1].record["seconds_left"] == pytest.approx((once / 4 + four + once + four) / (once / 4))


def test_a_failed_model_takes_no_more_time(models, now):
    jobs = list(models)
    lines = []
    board = Board(models, lines.append)
    board.fail(jobs[0], "no space")
    assert lines == ["failed: rope-seed0: no space"]
    board.close()
    assert lines[-1] == "0 of 2 models in 0:00"
    board.receive(jobs[1], windows(1))
    assert "rope-seed0" not in lines[-1]
