"""The training loop: `run` trains or resumes a run, on one process or under torchrun."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scaleinv.data import document_ids
from scaleinv.model import GPT
from scaleinv.ops.api import which_backend
from scaleinv.train import checkpoint, store
from scaleinv.train.config import TrainConfig
from scaleinv.train.distributed import World, accumulating, replicate, shard, world
from scaleinv.train.logs import Metrics, Progress
from scaleinv.train.optim import build_optimizers, set_rates, state_tensors
from scaleinv.train.validation import LengthLoss, loss_at_length, usable_tokens


class Diverged(RuntimeError):
    """The loss became NaN or infinite."""


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended."""

    step: int
    """Optimiser steps done."""
    finished: bool
    """False where a signal stopped it: resume it to go on."""
    signal: int | None
    validation: dict[str, LengthLoss]
    """By multiple of the training length ("1x"), if the last step was reached."""


def run(config: TrainConfig, *, resume: bool = False, say: Callable[[str], None] = lambda text: None) -> Result:
    """Train; with ``resume``, go on from the last whole checkpoint in ``config.out``.

    SIGINT and SIGTERM save and leave. Under torchrun every rank calls this with the same arguments.

    Args:
        say: takes progress, line by line.
    """
    with world(config.device) as here:
        return _Run(config, here, say if here.first else lambda text: None).go(resume)


class _Run:
    def __init__(self, config: TrainConfig, here: World, say: Callable[[str], None]) -> None:
        if config.sequences % here.size:
            raise ValueError(f"batch_tokens makes {config.sequences} sequences, which {here.size} ranks cannot share")
        self.config, self.here, self.say = config, here, say
        self.folder = Path(config.out)
        self.checkpoints = self.folder / store.CHECKPOINTS
        self.lengths = {f"{times}x": times * config.model.train_length for times in config.val_multiples}

    def go(self, resume: bool) -> Result:
        config, here = self.config, self.here
        problem = None
        if here.first:  # all ranks must leave together, so rank 0 looks and tells
            try:
                self._check_folder(resume)
            except ValueError as error:
                problem = error
        if here.any(problem is not None):
            raise problem or ValueError(f"out {self.folder} cannot be used")
        with here.first_goes_first():
            self.corpus = store.run_corpus(config, config.model.train_length, fit=True)
            config.model.vocab_size = self.corpus.vocab_size
            self.val_tokens = usable_tokens(
                self.corpus.val.total, config.val_tokens, [config.model.train_length, *self.lengths.values()]
            )
        self.model, step = self._model(resume)
        if here.first:
            store.write_config(self.folder, config, self.corpus)
            (self.folder / store.TOKENIZER).mkdir(exist_ok=True)
            self.corpus.tokenizer.save(self.folder / store.TOKENIZER)
            self.metrics = Metrics(self.folder, step, config.to_json(), config.wandb)
        self._announce(step)
        try:
            with _signals() as caught:
                return self._train(step, caught)
        finally:
            if here.first:
                self.metrics.close()

    def _check_folder(self, resume: bool) -> None:
        store.check_writable(self.folder)
        held = (self.folder / store.CONFIG).exists()
        if held and not resume:
            raise ValueError(f"out {self.folder} already holds a run: resume it, or choose another folder")
        if resume and not held:
            raise ValueError(f"out {self.folder} holds no run to resume")
        checkpoint.remove_partial(self.checkpoints)

    def _model(self, resume: bool) -> tuple[GPT, int]:
        config, here = self.config, self.here
        torch.manual_seed(config.seed)
        model = GPT(config.model).to(here.device)
        if config.parallel == "fsdp":
            shard(model, here, model.blocks)
        self.optimizers = build_optimizers(model, config)
        self.tensors = state_tensors(model, self.optimizers)
        self.tensors["rng"] = torch.get_rng_state()
        step = 0
        found = checkpoint.newest(self.checkpoints) if resume else None
        if found is not None:
            path, manifest = found
            if manifest["extra"]["corpus"] != self.corpus.sha256:
                raise ValueError(f"data has changed since {path} was written: its hash is now {self.corpus.sha256}")
            checkpoint.load(path, self.tensors)
            torch.set_rng_state(self.tensors["rng"])
            step = manifest["step"]
            self.say(f"resuming {self.folder} at step {step}")
        elif resume:
            self.say(f"{self.folder} has no checkpoint: starting again at step 0")
        wanted = here.device.type == "cuda" if config.compile is None else config.compile
        compiled = torch.compile(model) if wanted else model
        self.forward: nn.Module = replicate(compiled, here, config.parallel)  # type: ignore[arg-type]
        return model, step

    def _announce(self, step: int) -> None:
        config, here = self.config, self.here
        probe = torch.zeros(1, config.model.heads, 1, config.model.head_dim, device=here.device, requires_grad=True)
        with self._precision():
            backend = which_backend(probe, probe, probe, detail=True)
        ranks = f", {here.size} ranks ({config.parallel})" if here.size > 1 else ""
        self.say(f"{config.model.method}: {self.model.count_parameters():,} parameters on {here.device}{ranks}")
        self.say(f"attention backend {backend}; {torch.get_num_threads()} threads")
        self.say(f"data {self.corpus.description}")
        self.say(f"sha256 {self.corpus.sha256[:16]}…; steps {step} to {config.steps} of {config.batch_tokens:,} tokens")

    def _train(self, step: int, caught: list[int]) -> Result:
        config, here = self.config, self.here
        progress = Progress(config.steps, step, config.batch_tokens, self.say, config.log_every)
        validation: dict[str, LengthLoss] = {}
        while step < config.steps:
            factor = config.learning_rate(step)
            loss = self._step(step, factor)
            step += 1
            progress.show(step, loss, factor)
            record: dict[str, Any] = {"step": step, "loss": loss, "lr": factor * config.lr_matrices}
            record["tokens_per_second"] = progress.rate
            last = step == config.steps
            began = time.monotonic()
            if step % config.val_every == 0 or last:
                validation = self._validate()
                record["validation"] = {name: result.mean for name, result in validation.items()}
            if here.first:
                self.metrics.write(record)
            stopping = here.any(bool(caught))
            if step % config.checkpoint_every == 0 or last or stopping:
                self._save(step)
            progress.pause(time.monotonic() - began)
            if stopping and not last:
                number = caught[0] if caught else signal.SIGTERM
                self.say(f"stopped at step {step}; go on with: scaleinv train --resume {self.folder}")
                return Result(step, False, number, {})
        if not validation:  # resumed after the last step
            validation = self._validate()
            if here.any(here.first and store.weights_step(self.folder) != step):
                self._save(step)
        return Result(step, True, None, validation)

    def _step(self, step: int, factor: float) -> float:
        """One optimiser step; returns the mean loss before it."""
        config, here = self.config, self.here
        length = config.model.train_length
        inputs, targets = self.corpus.train.batch(
            step, config.sequences, length, rank=here.rank, world=here.size, order=config.order, seed=config.seed
        )
        tokens = config.micro_tokens or (65_536 if here.device.type == "cuda" else 16_384)
        parts = math.ceil(inputs.numel() / max(tokens, length))
        total = torch.zeros((), device=here.device)
        pairs = list(zip(inputs.chunk(parts), targets.chunk(parts), strict=True))
        for number, (x, y) in enumerate(pairs):
            x, y = x.to(here.device, non_blocking=True), y.to(here.device, non_blocking=True)
            ids = document_ids(x, self.corpus.train.end_of_text) if config.document_masks else None
            with accumulating(self.forward, last=number == len(pairs) - 1):
                with self._precision():
                    loss = self.forward(x, y, document_ids=ids).sum() / inputs.numel()
                loss.backward()
            total += loss.detach()
        mean = here.mean(total).item()
        if not math.isfinite(mean):
            raise Diverged(f"loss became {mean} at step {step + 1}: {self._last_good()}")
        if config.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        set_rates(self.optimizers, factor)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return mean

    def _validate(self) -> dict[str, LengthLoss]:
        results = {}
        for name, length in self.lengths.items():
            with self._precision():
                results[name] = loss_at_length(
                    self.model,
                    self.corpus.val,
                    length,
                    self.val_tokens // length * length,
                    here=self.here,
                    document_masks=self.config.document_masks,
                )
        self.say("validation " + "  ".join(f"{name} {result.mean:.4f}" for name, result in results.items()))
        return results

    def _save(self, step: int) -> None:
        self.tensors["rng"].copy_(torch.get_rng_state())
        weights = {name.removeprefix("model."): x for name, x in self.tensors.items() if name.startswith("model.")}
        weights = checkpoint.to_cpu(weights)
        if self.here.any(not all(bool(torch.isfinite(x).all()) for x in weights.values())):
            raise Diverged(f"weights became NaN or infinite at step {step}: {self._last_good()}")
        extra = {"corpus": self.corpus.sha256}
        checkpoint.save(self.checkpoints, step, self.tensors, extra, self.config.keep)
        if self.here.first:
            try:
                store.write_weights(self.folder, weights, step)
            except OSError as error:
                raise checkpoint.CheckpointError(f"weights could not be written to {self.folder}: {error}") from error
        self.here.barrier()

    def _last_good(self) -> str:
        if not any(self.checkpoints.glob("step-*")):
            return "there is no checkpoint yet; lower the learning rates"
        return f"the last good checkpoint is in {self.checkpoints}"

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.here.device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return contextlib.nullcontext()


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM instead of dying of them; a second SIGINT interrupts at once."""
    caught: list[int] = []

    def note(number: int, frame: Any) -> None:
        if caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        caught.append(number)

    try:
        previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are somebody else's
        yield caught
        return
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
