"""Fine-tuning on the needle task: the pretraining optimisers, and a loss on the answers only."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from scaleinv.data import Corpus, Tokenizer
from scaleinv.eval.needle_task import NeedleTask, longest_frame, make_sample, stack
from scaleinv.files import locked, read_object, remove_leftovers, write_json
from scaleinv.machine import Precision
from scaleinv.model import GPT
from scaleinv.train import Diverged, TrainConfig, checkpoint, optim, store
from scaleinv.train.logs import Metrics, Progress
from scaleinv.train.passes import micro_batches, precision

SETTINGS = "needle.json"
KEEP = 1
"""Checkpoints to keep."""


@dataclasses.dataclass(frozen=True)
class NeedleTraining:
    """How to fine-tune. The defaults are the paper's; `mini` suits `NeedleTask.mini`."""

    steps: int = 300
    warmup: int = 100
    """Steps over which the learning rates rise from 0."""
    decay: int = 100
    """Steps at the end over which they fall to 0; between warm-up and decay they are constant."""
    sequences: int = 64
    """Samples per optimiser step, at the task's length."""
    shortest: int = 96
    """Tokens per sample in the first steps, if there are ``short`` or ``growth`` steps."""
    short: int = 0
    """Steps with the shortest samples. Every step has the same number of tokens, so these have more samples."""
    growth: int = 0
    """Steps over which the samples then grow to the task's length, by the same factor in each step."""
    rate: float = 1.0
    """Factor on the learning rates of pretraining."""
    precision: Precision = "auto"
    seed: int | None = None
    """Of the samples; None for the run's own."""
    checkpoint_every: int = 25
    log_every: int = 10

    def __post_init__(self) -> None:
        for name in ("steps", "sequences", "shortest", "checkpoint_every", "log_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        for name in ("warmup", "decay", "short", "growth", "seed"):
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= 0) and not (name == "seed" and value is None):
                raise ValueError(f"{name} must be an integer and not negative, got {value!r}")
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision must be one of {', '.join(get_args(Precision))}, got {self.precision!r}")
        if self.warmup + self.decay > self.steps:
            raise ValueError(
                f"warmup and decay must fit into steps={self.steps}, got {self.warmup} and {self.decay} steps"
            )
        if self.short + self.growth > self.steps:
            raise ValueError(
                f"short and growth must fit into steps={self.steps}, got {self.short} and {self.growth} steps"
            )
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise ValueError(f"rate must be positive and finite, got {self.rate}")

    @classmethod
    def mini(cls) -> NeedleTraining:
        """For `NeedleTask.mini`: most of the steps on short samples, where a model learns to copy."""
        return cls(steps=800, warmup=30, decay=350, sequences=16, short=450, growth=200)

    def to_json(self) -> dict[str, Any]:
        """What the result depends on; a precision of "auto" is left out, as in files from before there was a choice."""
        kept = {name: value for name, value in dataclasses.asdict(self).items() if not name.endswith("_every")}
        return kept if self.precision != "auto" else {name: kept[name] for name in kept if name != "precision"}

    def scaled(self, steps: int) -> NeedleTraining:
        """The same training in another number of steps: warm-up, decay and the rest take the same shares."""
        shares = {name: getattr(self, name) * steps // self.steps for name in ("warmup", "decay", "short", "growth")}
        return dataclasses.replace(self, steps=steps, **shares)

    def fitted(self, task: NeedleTask, tokenizer: Tokenizer) -> NeedleTraining:
        """The same training, with samples that are never so short that less than a third of them is text."""
        return dataclasses.replace(self, shortest=max(self.shortest, longest_frame(task, tokenizer) * 3 // 2))

    def learning_rate(self, step: int) -> float:
        """Factor on every learning rate at a step, counted from 0."""
        rising = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        falling = min(1.0, (self.steps - step) / self.decay) if self.decay else 1.0
        return self.rate * min(rising, falling)

    def length(self, step: int, full: int) -> int:
        """Tokens in the samples of a step, for a task of ``full`` tokens."""
        if step < self.short:
            return min(self.shortest, full)
        grown = step - self.short
        if grown >= self.growth or self.shortest >= full:
            return full
        return round(self.shortest * (full / self.shortest) ** (grown / self.growth))

    def samples(self, step: int, full: int) -> range:
        """Indices of the samples of a step: no two steps share one."""
        tokens = self.sequences * full
        first = step * (tokens // min(self.shortest, full))
        return range(first, first + tokens // self.length(step, full))


def finetune(
    run: Path | str,
    out: Path | str,
    task: NeedleTask,
    training: NeedleTraining | None = None,
    *,
    corpus: Corpus | None = None,
    device: str | torch.device = "cpu",
    progress: Callable[[str], None] = lambda text: None,
) -> Path:
    """Fine-tune a run's newest weights on the task; returns ``out``, a folder that `load_model` reads.

    If interrupted, the same call resumes from the last checkpoint and takes the same steps. If finished, it returns at
    once. Another run, task or training in the same folder is refused, and so is a second process.

    Args:
        corpus: the run's own, if it has been loaded already.
        progress: called with each line of progress.
    """
    training = training or NeedleTraining()
    run, out = Path(run), Path(out)
    model, config = store.load_model(run, device)
    if training.seed is None:
        training = dataclasses.replace(training, seed=config.seed)
    corpus = corpus or store.run_corpus(config)
    settings = {
        "weights": store.weights_digest(run),
        "task": dataclasses.asdict(task),
        "training": training.to_json(),
    }
    store.check_writable(out)
    with locked(out):
        _claim(out, settings)
        optimizers = optim.build_optimizers(model, config)
        tensors = optim.state_tensors(model, optimizers)
        found = checkpoint.newest(out / store.CHECKPOINTS)
        start = 0
        if found is not None:
            checkpoint.load(found[0], tensors)
            start = found[1]["step"]
        if start < training.steps:
            if start:
                progress(f"resuming {out} at step {start}")
            store.write_run(out, dataclasses.replace(config, out=str(out)), corpus)
            metrics = Metrics(out, start, settings, None)
            meter = Progress(training.steps, start, training.sequences * task.length, progress, training.log_every)
            model.train()
            try:
                for step in range(start, training.steps):
                    factor = training.learning_rate(step)
                    loss, right = _gradients(model, config, corpus, task, training, step)
                    if not math.isfinite(loss):
                        lower = f"lower rate={training.rate}"
                        raise Diverged(f"loss became {loss} at step {step + 1} of fine-tuning: {lower}")
                    optim.step(optimizers, factor)
                    done = step + 1
                    meter.show(done, loss, factor)
                    rate = factor * config.lr_matrices
                    metrics.write({"step": done, "loss": loss, "token_accuracy": right, "lr": rate})
                    if done % training.checkpoint_every == 0 or done == training.steps:
                        checkpoint.save(out / store.CHECKPOINTS, done, tensors, {}, KEEP)
            finally:
                metrics.close()
        if store.weights_step(out) != training.steps:
            store.write_weights(out, checkpoint.to_cpu(optim.weights_of(tensors)), training.steps)
    return out


def answer_logits(model: GPT, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Logits ``[n, vocabulary]`` (float32) for the masked tokens of ``tokens [B, N]``, and those tokens ``[n]``."""
    targets, asked = tokens[:, 1:], mask[:, 1:]
    last = asked.shape[1] - int(asked.any(0).int().argmax())  # answers stand at the end
    hidden = model.hidden(tokens[:, :-1], last=last)[asked[:, -last:]]
    return model.output(hidden).float(), targets[asked]


def _gradients(
    model: GPT, config: TrainConfig, corpus: Corpus, task: NeedleTask, training: NeedleTraining, step: int
) -> tuple[float, float]:
    """Compute one step's gradients; returns the answers' loss in nats per token, and the share of likeliest tokens."""
    sized, seed = task.at(training.length(step, task.length)), training.seed or 0
    samples = [
        make_sample(sized, corpus.train, corpus.tokenizer, seed=seed, index=index, split="train")
        for index in training.samples(step, task.length)
    ]
    tokens, mask = stack(samples)
    device = next(model.parameters()).device
    count = int(mask.sum())
    loss = torch.zeros((), device=device)
    right = torch.zeros((), device=device)
    for part, where in micro_batches(tokens, mask, device=device, tokens=config.micro_tokens):
        with precision(device, training.precision):
            logits, targets = answer_logits(model, part, where)
        piece = F.cross_entropy(logits, targets, reduction="sum") / count
        piece.backward()
        loss += piece.detach()
        right += (logits.detach().argmax(-1) == targets).sum() / count
    return loss.item(), right.item()


def _claim(out: Path, settings: dict[str, Any]) -> None:
    """Note in a folder what is fine-tuned there; refuse the folder if it holds something else."""
    path = out / SETTINGS
    if not path.exists():
        if (out / store.CONFIG).exists():
            raise ValueError(f"out {out} already holds a run: choose another folder")
        write_json(path, settings)
    elif read_object(path) != json.loads(json.dumps(settings)):
        raise ValueError(f"out {out} holds a fine-tuning of another run, task or training (see {path}): choose another")
    remove_leftovers(out, out / store.TOKENIZER)
    checkpoint.remove_partial(out / store.CHECKPOINTS)
    checkpoint.delete_old(out / store.CHECKPOINTS, KEEP)
