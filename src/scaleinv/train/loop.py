"""The training loop: `run` trains or resumes a run, on one process or under torchrun."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scaleinv.constants import TAU
from scaleinv.distributed import RankLost
from scaleinv.files import locked, remove_leftovers
from scaleinv.logits import ScaleInvariant
from scaleinv.model import GPT
from scaleinv.ops import registry
from scaleinv.ops.agreement import plain_call
from scaleinv.progress import Report
from scaleinv.train import checkpoint, optim, store
from scaleinv.train.config import TrainConfig
from scaleinv.train.distributed import World, accumulating, replicate, resume_command, shard, world
from scaleinv.train.logs import Metrics, Progress
from scaleinv.train.passes import micro_batches, precision
from scaleinv.train.validation import LengthLoss, fitting, loss_at_length, usable_tokens


class Diverged(RuntimeError):
    """The loss became NaN or infinite."""


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended."""

    step: int
    """Optimiser steps done."""
    finished: bool
    """False if a signal stopped it: resume it to continue."""
    signal: int | None
    validation: dict[str, LengthLoss]
    """Validation loss by length ("1x", as in ``val_lengths``), if the last step was reached."""


def run(config: TrainConfig, *, resume: bool = False, progress: Callable[[str], None] = lambda text: None) -> Result:
    """Train; with ``resume``, continue from the last whole checkpoint in ``config.out``.

    On SIGINT or SIGTERM it saves and stops. Under torchrun every rank calls this with the same arguments. Only one run
    at a time may write to a folder: the second raises `scaleinv.files.FolderInUse`.

    Args:
        progress: called with each line of progress.
    """
    config = copy.deepcopy(config)  # the run fills in the vocabulary
    if not resume:
        _check_method(config)
    settings = config.device, config.context_parallel, config.context_layout
    try:
        with world(*settings) as here, contextlib.ExitStack() as stack:
            return _Run(config, here, progress if here.first else lambda text: None).go(resume, stack)
    except RankLost as error:
        again = resume_command(config.out)
        raise RankLost(f"{error}; to continue from the last checkpoint: {again}") from error


def _check_method(config: TrainConfig) -> None:
    """Raise ValueError if a lengthscale is set but the method has none."""
    model = config.model
    if not isinstance(model.sized_method().logits, ScaleInvariant):
        for name, value, unset in (("tau", model.tau, TAU), ("learnable_tau", model.learnable_tau, False)):
            if value != unset:
                raise ValueError(f"{name} must be left unset for {model.method!r}, which has none, got {value}")


class _Run:
    def __init__(self, config: TrainConfig, here: World, progress: Callable[[str], None]) -> None:
        if config.sequences % here.groups:
            ranks = f"{here.groups} ranks" if here.context is None else f"{here.groups} groups of ranks"
            raise ValueError(f"batch_tokens makes {config.sequences} sequences, which {ranks} cannot share")
        for length in (config.model.train_length, *config.validation_lengths().values()):
            here.runs(length)  # raises now if the ranks cannot share this length
        self.config, self.here, self.progress = config, here, progress
        self.folder = Path(config.out)
        self.checkpoints = self.folder / store.CHECKPOINTS

    def go(self, resume: bool, stack: contextlib.ExitStack) -> Result:
        """Open the folder and prepare everything; ``stack`` closes the folder again."""
        config, here = self.config, self.here
        here.on_first(self._open_folder, resume, stack)
        with here.first_goes_first():
            self.corpus = store.run_corpus(config, config.model.train_length, fit=True)
        config.model.vocab_size = self.corpus.vocab_size
        self._choose_lengths()
        self.model, step = self._model(resume)
        here.on_first(self._open_logs, step, stack)
        if step and here.any(here.first and store.weights_step(self.folder) != step):
            self._write_weights(step, self._weights())
        self._announce(step)
        with _signals() as caught, here.watched():
            return self._train(step, caught)

    def _open_folder(self, resume: bool, stack: contextlib.ExitStack) -> None:
        """Make, lock and check the folder; it is removed again if nothing is written to it."""
        made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        stack.callback(_remove_empty, made)
        store.check_writable(self.folder)
        stack.enter_context(locked(self.folder))
        held = (self.folder / store.CONFIG).exists()
        if held and not resume:
            raise ValueError(f"out {self.folder} already holds a run: resume it, or choose another folder")
        if resume and not held:
            raise ValueError(f"out {self.folder} holds no run to resume")
        remove_leftovers(self.folder, self.folder / store.TOKENIZER)
        checkpoint.remove_partial(self.checkpoints)
        if resume:
            checkpoint.delete_old(self.checkpoints, self.config.keep)

    def _open_logs(self, step: int, stack: contextlib.ExitStack) -> None:
        # The metrics come first: if a package that they need is missing, the folder holds no run yet.
        self.metrics = Metrics(self.folder, step, self.config.to_json(), self.config.wandb)
        stack.callback(self.metrics.close)
        store.write_run(self.folder, self.config, self.corpus)

    def _record(self, values: dict[str, Any]) -> None:
        self.metrics.write(values)

    def _choose_lengths(self) -> None:
        """Validation lengths that the held-out tokens have room for."""
        config, total = self.config, self.corpus.val.total
        asked = config.validation_lengths()
        self.lengths = fitting(asked, total, config.val_tokens)
        missing = [label for label in asked if label not in self.lengths]
        if missing:
            held_out = min(total, config.val_tokens)
            self.progress(f"no validation at {', '.join(missing)}: there are only {held_out:,} tokens to validate on")
        lengths = [config.model.train_length, *self.lengths.values()]
        self.val_tokens = usable_tokens(total, config.val_tokens, lengths) if self.lengths else 0

    def _model(self, resume: bool) -> tuple[GPT, int]:
        config, here = self.config, self.here
        torch.manual_seed(config.seed)
        model = GPT(config.model).to(here.device)
        model.context = here.context
        if config.parallel == "fsdp":
            shard(model, here, model.blocks)
        self.optimizers = optim.build_optimizers(model, config)
        self.tensors = optim.state_tensors(model, self.optimizers)
        self.tensors["rng"] = torch.get_rng_state()
        step = 0
        found = checkpoint.newest(self.checkpoints) if resume else None
        if found is not None:
            path, manifest = found
            step = manifest["step"]
            self._check_resume(path, step, manifest["extra"])
            checkpoint.load(path, self.tensors)
            torch.set_rng_state(self.tensors["rng"])
            self.progress(f"resuming {self.folder} at step {step}")
        elif resume:
            self.progress(f"{self.folder} has no whole checkpoint: starting again at step 0")
        wanted = here.device.type == "cuda" if config.compile is None else config.compile
        compiled = torch.compile(model) if wanted else model
        self.forward: nn.Module = replicate(compiled, here, config.parallel)  # type: ignore[arg-type]
        return model, step

    def _check_resume(self, path: Path, step: int, extra: dict[str, Any]) -> None:
        """Raise ValueError if a checkpoint has other data or settings, or is past the last step."""
        if "corpus" not in extra or not isinstance(extra.get("settings", {}), dict):
            raise ValueError(f"{path} is not a checkpoint of `scaleinv train`")
        if extra["corpus"] != self.corpus.sha256:
            raise ValueError(f"the data changed after {path} was written: its hash is now {self.corpus.sha256}")
        settings = self.config.fixed()
        for name, value in extra.get("settings", {}).items():
            if settings.get(name, value) != value:
                raise ValueError(
                    f"{name.removeprefix('model.')} cannot change when a run resumes: it was {value} when {path} was "
                    f"written, got {settings[name]}"
                )
        if step > self.config.steps:
            raise ValueError(f"steps must be at least {step}, which the run has reached, got {self.config.steps}")

    def _announce(self, step: int) -> None:
        config, here = self.config, self.here
        probe = torch.zeros(1, config.model.heads, 1, config.model.head_dim, device=here.device, requires_grad=True)
        with precision(here.device, config.precision):
            call = plain_call(probe, probe, probe)
            backend = registry.choose("auto", call, in_blocks=here.context is not None).name
        ranks = f", {here.size} ranks ({config.parallel})" if here.size > 1 else ""
        if here.context is not None:
            ranks += f", {here.context.ranks} per sequence ({here.context.layout})"
        self.progress(f"{config.model.method}: {self.model.count_parameters():,} parameters on {here.device}{ranks}")
        self.progress(f"attention backend {backend}; {torch.get_num_threads()} threads")
        self.progress(f"data {self.corpus.description}")
        self.progress(
            f"sha256 {self.corpus.sha256[:16]}…; steps {step} to {config.steps} of {config.batch_tokens:,} tokens"
        )

    def _train(self, step: int, caught: list[int]) -> Result:
        config, here = self.config, self.here
        meter = Progress(config.steps, step, config.batch_tokens, self.progress, config.log_every)
        validation: dict[str, LengthLoss] | None = None
        while step < config.steps:
            factor = config.learning_rate(step)
            loss = self._step(step, factor)
            step += 1
            meter.show(step, loss, factor)
            record: dict[str, Any] = {"step": step, "loss": loss, "lr": factor * config.lr_matrices}
            record["tokens_per_second"] = meter.rate
            last = step == config.steps
            began = time.monotonic()
            if self.lengths and (step % config.val_every == 0 or last):
                validation = self._validate(step)
                record["validation"] = {name: result.mean for name, result in validation.items()}
            here.on_first(self._record, record)
            stopping = here.any(bool(caught))
            if step % config.checkpoint_every == 0 or last or stopping:
                self._save(step)
            meter.pause(time.monotonic() - began)
            if stopping and not last:
                number = caught[0] if caught else signal.SIGTERM
                self.progress(f"stopped at step {step}; to continue: {resume_command(config.out)}")
                return Result(step, False, number, {})
        if validation is None:  # resumed after the last step, or no lengths
            validation = self._validate(step)
        return Result(step, True, None, validation)

    def _step(self, step: int, factor: float) -> float:
        """Take one optimiser step; returns the mean loss before it."""
        config, here = self.config, self.here
        length = config.model.train_length
        inputs, targets = self.corpus.train.batch(
            step,
            config.sequences,
            length,
            rank=here.group,
            world=here.groups,
            order=config.order,
            seed=config.seed,
            runs=here.runs(length),
        )
        total = torch.zeros((), device=here.device)
        parts = micro_batches(inputs, targets, device=here.device, tokens=config.micro_tokens)
        for number, (x, y) in enumerate(parts):
            ids = here.document_ids(x, self.corpus.train.end_of_text) if config.document_masks else None
            with accumulating(self.forward, last=number == len(parts) - 1):
                with precision(here.device, config.precision):
                    loss = self.forward(x, y, document_ids=ids).sum() / inputs.numel()
                loss.backward()
            total += loss.detach()
        mean = here.mean(total).item()
        if not math.isfinite(mean):
            raise Diverged(f"loss became {mean} at step {step + 1}: {self._last_good()}")
        if config.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        optim.step(self.optimizers, factor)
        return mean

    def _validate(self, step: int) -> dict[str, LengthLoss]:
        results = {}
        for name, length in self.lengths.items():
            results[name] = loss_at_length(
                self.model,
                self.corpus.val,
                length,
                self.val_tokens // length * length,
                here=self.here,
                document_masks=self.config.document_masks,
            )
        means = {name: result.mean for name, result in results.items()}
        if means:
            text = "validation " + "  ".join(f"{name} {mean:.4f}" for name, mean in means.items())
            self.progress(Report(text, kind="validation", step=step, losses=means))
        for name, mean in means.items():
            if not math.isfinite(mean):
                raise Diverged(f"validation loss at {name} became {mean} at step {step}: {self._last_good()}")
        return results

    def _save(self, step: int) -> None:
        self.tensors["rng"].copy_(torch.get_rng_state())
        weights = self._weights()
        if self.here.any(not all(bool(torch.isfinite(x).all()) for x in weights.values())):
            raise Diverged(f"weights became NaN or infinite at step {step}: {self._last_good()}")
        extra = {"corpus": self.corpus.sha256, "settings": self.config.fixed()}
        checkpoint.save(self.checkpoints, step, self.tensors, extra, self.config.keep)
        self._write_weights(step, weights)

    def _weights(self) -> dict[str, Tensor]:
        return checkpoint.to_cpu(optim.weights_of(self.tensors))

    def _write_weights(self, step: int, weights: dict[str, Tensor]) -> None:
        self.here.on_first(store.write_weights, self.folder, weights, step)

    def _last_good(self) -> str:
        if not any(self.checkpoints.glob("step-*")):
            return "there is no checkpoint yet; lower the learning rates"
        return f"the last good checkpoint is in {self.checkpoints}"


def _remove_empty(folders: list[Path]) -> None:
    """Delete the folders that are empty, innermost first."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of ending the process; a second SIGINT interrupts at once."""
    caught: list[int] = []

    def note(number: int, frame: Any) -> None:
        if caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        caught.append(number)

    try:
        previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, which alone may handle signals
        yield caught
        return
    try:
        yield caught
    except RankLost:
        del previous[signal.SIGTERM]  # torchrun sends it to all ranks if one fails: let this one say why it ends
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
