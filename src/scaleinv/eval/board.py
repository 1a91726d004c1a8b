"""One line about a whole comparison while it runs: how far each model is, and the time left."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from scaleinv.eval.plan import Comparison, Job
from scaleinv.progress import Progress, Report, clock

BACKWARD = 3
"""How many times longer training takes than evaluating the same tokens, roughly."""


class Board:
    """Turns the records of workers into lines of progress."""

    def __init__(self, plan: Comparison, jobs: Sequence[Job], progress: Progress) -> None:
        self.progress = progress
        self.lock = threading.Lock()
        self.models = {job: _Model(plan, job) for job in jobs}
        self.began = self.counted_from = time.monotonic()

    def receive(self, job: Job, record: dict[str, Any]) -> None:
        """Show what a worker reports."""
        with self.lock:
            if all(not model.seen for model in self.models.values()):
                self.counted_from = time.monotonic()
            self.models[job].receive(record)
            if self.models[job].state:
                self.progress(self._line())

    def finish(self, job: Job) -> None:
        """A model is trained and evaluated: a line with its losses stays."""
        with self.lock:
            model = self.models[job]
            model.finish()
            if model.losses:
                self.progress(f"{job.name}: {', '.join(model.losses)}")

    def fail(self, job: Job, message: str) -> None:
        """A model failed: it no longer counts towards the time left."""
        with self.lock:
            self.models[job].finish(failed=True)
            self.progress(f"failed: {job.name}: {message}")

    def close(self) -> None:
        """Say how many models are done."""
        with self.lock:
            done = sum(model.finished for model in self.models.values())
            self.progress(f"{done} of {len(self.models)} models in {clock(time.monotonic() - self.began)}")

    def _line(self) -> Report:
        models = self.models.values()
        done, left = sum(model.finished for model in models), self._seconds_left()
        states = " | ".join(f"{job.name} {model.state}" for job, model in self.models.items() if model.state)
        time_left = "" if left is None else f", {clock(left)} left"
        text = f"{done} of {len(models)} models{time_left}: {states}"
        return Report(text, passing=True, kind="comparison", done=done, models=len(models), seconds_left=left)

    def _seconds_left(self) -> float | None:
        """Estimated from the tokens that all models have read since the start."""
        read = sum(model.read - model.before for model in self.models.values())
        if not read:
            return None
        return (
            (time.monotonic() - self.counted_from)
            / read
            * sum(model.total - model.read for model in self.models.values())
        )


class _Model:
    """How far one model is, in tokens: those of training count `BACKWARD` times."""

    def __init__(self, plan: Comparison, job: Job) -> None:
        config = plan.config(job)
        self.step = BACKWARD * config.batch_tokens
        self.training = config.steps * self.step
        self.pass_ = plan.tokens
        self.total = self.training + len(job.methods) * len(plan.lengths.split(",")) * plan.tokens
        self.read = self.before = 0.0
        self.passes = 0
        self.state = ""
        self.losses: list[str] = []
        self.finished = self.seen = False

    def receive(self, record: dict[str, Any]) -> None:
        """Take in a record of the model's worker."""
        kind = record["kind"]
        if kind == "step":
            self.read = record["step"] * self.step
            self.state = f"step {record['step']}/{record['steps']} loss {record['loss']:.3f}"
        elif kind == "windows":
            self.read = self.training + (self.passes + record["done"] / record["total"]) * self.pass_
            self.state = f"{record['method']} at {record['length']}: {record['done']}/{record['total']} windows"
        elif kind == "evaluated":
            self.passes += 1
            self.losses.append(f"{record['method']} at {record['length']} {record['mean']:.4f}")
        if kind in ("step", "windows") and not self.seen:  # earlier work says nothing about the speed now
            self.before, self.seen = self.read, True

    def finish(self, failed: bool = False) -> None:
        if not self.seen:
            self.before = self.total
        self.read, self.finished, self.state = self.total, not failed, ""
