"""Where a run's numbers go: metrics.jsonl, TensorBoard, Weights & Biases, and one progress line."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scaleinv.files import UnreadableFile, read_lines, write_text
from scaleinv.progress import Report, clock

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"


class Metrics:
    """Writes one JSON object per step, and the same numbers to TensorBoard and Weights & Biases.

    Lines past ``start`` (a resumed run's step) are dropped, because these steps are trained again.
    """

    def __init__(self, folder: Path, start: int, config: dict[str, Any], wandb_project: str | None) -> None:
        self.wandb = _wandb(wandb_project, folder, config) if wandb_project else None
        self.path = folder / METRICS
        kept = [line for line in read_metrics(folder) if line["step"] <= start] if start else []
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self.file = self.path.open("ab", buffering=0)
        self.board = _tensorboard(folder, start)

    def write(self, values: dict[str, Any]) -> None:
        """Add the numbers of a step; on a full disk, OSError names the file."""
        line = (json.dumps(values) + "\n").encode()
        scalars = {name: value for name, value in _flat(values) if name != "step"}
        try:
            if self.file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self.board is not None:
                for name, value in scalars.items():
                    self.board.add_scalar(name, value, values["step"])
        except OSError as error:
            raise OSError(error.errno, f"metrics could not be written: {error.strerror}", str(self.path)) from error
        if self.wandb is not None:
            self.wandb.log(scalars, step=values["step"])

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            try:
                self.board.close()
            except OSError as error:
                logger.warning("the last TensorBoard records are lost: %s", error.strerror)
        if self.wandb is not None:
            self.wandb.finish()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, each with its step; none if it is missing.

    A last line that a killed run left half written is skipped; other damage raises ValueError that names the file.
    """
    path = folder / METRICS
    advice = "delete the file to continue without the numbers so far"
    lines = read_lines(path, advice) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        if not isinstance(line.get("step"), int):
            raise UnreadableFile(path, f"has no step in record {number}", advice)
    return lines


class Progress:
    """One line: step, loss, learning rate, tokens per second, time left. It stays in place on a terminal."""

    def __init__(self, steps: int, start: int, tokens: int, progress: Callable[[str], None], every: int) -> None:
        self.steps, self.start, self.tokens, self.progress, self.every = steps, start, tokens, progress, every
        self.began = self.marked = time.monotonic()
        self.marked_step = start
        self.rate = 0.0

    def pause(self, seconds: float) -> None:
        """Leave out time that was not spent training."""
        self.began += seconds
        self.marked += seconds

    def show(self, step: int, loss: float, factor: float) -> None:
        """After step ``step`` (counted from 1)."""
        if step % self.every and step != self.steps:
            return
        now = time.monotonic()
        self.rate = (step - self.marked_step) * self.tokens / max(now - self.marked, 1e-9)
        self.marked, self.marked_step = now, step
        left = (now - self.began) / max(step - self.start, 1) * (self.steps - step)
        self.progress(
            Report(
                f"step {step}/{self.steps}  loss {loss:.4f}  lr ×{factor:.3f}  {self.rate:,.0f} tokens/s  "
                f"ETA {clock(left)}",
                passing=True,
                kind="step",
                step=step,
                steps=self.steps,
                loss=loss,
                tokens_per_second=self.rate,
            )
        )


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    flat: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            flat += _flat(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            flat.append((prefix + name, value))
    return flat


def _tensorboard(folder: Path, start: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.warning('no TensorBoard files are written: pip install "scaleinv[train]" to get them')
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1 if start else None)


def _wandb(project: str, folder: Path, config: dict[str, Any]) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise RuntimeError('reporting to Weights & Biases needs wandb: pip install "scaleinv[wandb]"') from error
    return wandb.init(project=project, dir=str(folder), config=config, name=folder.name, id=folder.name, resume="allow")
