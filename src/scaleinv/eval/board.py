"""One line about many models while they run: how far each is, and the time left."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from scaleinv.model import GPTConfig
from scaleinv.progress import Progress, Report, clock

BACKWARD = 3
"""How many times longer training takes than evaluating the same tokens, roughly."""


class Board:
    """Turns the records of workers into lines of progress.

    Args:
        models: what each model has to do, by its name.
    """

    def __init__(self, models: Mapping[str, ToDo], progress: Progress) -> None:
        self.progress = progress
        self.lock = threading.Lock()
        self.models = {name: _Model(todo) for name, todo in models.items()}
        self.began = self.counted_from = time.monotonic()

    def receive(self, name: str, record: dict[str, Any]) -> None:
        """Show what a worker reports."""
        with self.lock:
            if all(not model.seen for model in self.models.values()):
                self.counted_from = time.monotonic()
            self.models[name].receive(record)
            if self.models[name].state:
                self.progress(self._line())

    def finish(self, name: str) -> None:
        """A model is done: a line with its results stays."""
        with self.lock:
            model = self.models[name]
            model.finish()
            if model.results:
                self.progress(f"{name}: {', '.join(model.results)}")

    def fail(self, name: str, message: str) -> None:
        """A model failed: it no longer counts towards the time left."""
        with self.lock:
            self.models[name].finish(failed=True)
            self.progress(f"failed: {name}: {message}")

    def close(self) -> None:
        """Say how many models are done."""
        with self.lock:
            done = sum(model.finished for model in self.models.values())
            self.progress(f"{done} of {len(self.models)} models in {clock(time.monotonic() - self.began)}")

    def _line(self) -> Report:
        models = self.models.values()
        done, left = sum(model.finished for model in models), self._seconds_left()
        states = " | ".join(f"{name} {model.state}" for name, model in self.models.items() if model.state)
        time_left = "" if left is None else f", {clock(left)} left"
        text = f"{done} of {len(models)} models{time_left}: {states}"
        return Report(text, passing=True, kind="board", done=done, models=len(models), seconds_left=left)

    def _seconds_left(self) -> float | None:
        """Estimated from the work that all models have done since the start."""
        done = sum(model.done - model.before for model in self.models.values())
        if not done:
            return None
        return (
            (time.monotonic() - self.counted_from)
            / done
            * sum(model.total - model.done for model in self.models.values())
        )


class ToDo:
    """The work that a model has to do, in operations, roughly.

    Args:
        config: the model's shape.
        steps: optimiser steps, at the training length.
        batch_tokens: tokens per step.
        passes: length and tokens of each evaluation, in the order in which they are made.
    """

    def __init__(self, config: GPTConfig, steps: int, batch_tokens: int, passes: Sequence[tuple[int, int]]) -> None:
        self.step = BACKWARD * batch_tokens * forward_cost(config, config.train_length)
        self.steps = steps
        self.passes = [tokens * forward_cost(config, length) for length, tokens in passes]


def forward_cost(config: GPTConfig, length: int) -> float:
    """Multiplications of a forward pass for each token of a window: weights, then scores and values (causal)."""
    weights = 12 * config.layers * config.width**2 + config.vocab_size * config.width
    return weights + config.layers * config.width * length


class _Model:
    """How far one model is."""

    def __init__(self, todo: ToDo) -> None:
        self.todo = todo
        self.training = todo.steps * todo.step
        self.total = self.training + sum(todo.passes)
        self.done = self.before = 0.0
        self.passes = 0
        self.state = ""
        self.results: list[str] = []
        self.finished = self.seen = False

    def receive(self, record: dict[str, Any]) -> None:
        """Take in a record of the model's worker."""
        kind = record["kind"]
        if kind == "step":
            self.done = record["step"] * self.todo.step
            self.state = f"step {record['step']}/{record['steps']} loss {record['loss']:.3f}"
        elif kind in ("windows", "samples"):
            made, current = self.todo.passes[: self.passes], self.todo.passes[self.passes : self.passes + 1]
            self.done = self.training + sum(made) + record["done"] / record["total"] * sum(current)
            self.state = f"{record['method']} at {record['length']}: {record['done']}/{record['total']} {kind}"
        elif kind == "evaluated":
            self.passes += 1
            self.results.append(f"{record['method']} at {record['length']} {record['mean']:.4f}")
        if kind in ("step", "windows", "samples") and not self.seen:  # earlier work says nothing about the speed now
            self.before, self.seen = self.done, True

    def finish(self, failed: bool = False) -> None:
        if not self.seen:
            self.before = self.total
        self.done, self.finished, self.state = self.total, not failed, ""
