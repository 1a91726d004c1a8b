"""`adapt`: every variant and seed trained, evaluated before and after, and summed up."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import json
import math
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import DistributedType, PartialState

from scaleinv import lengths
from scaleinv.adaptation import AdaptConfig, trained_as, variant
from scaleinv.eval.loss import Evaluation
from scaleinv.eval.summary import Summary
from scaleinv.files import LOCK, locked, write_text
from scaleinv.hf.adapt import folders
from scaleinv.hf.adapt.data import Splits, load_splits
from scaleinv.hf.adapt.measure import losses_by_length
from scaleinv.hf.adapt.training import Steps, require_peft, train
from scaleinv.hf.adapt.variants import LONGEST, as_variant, check_lengths, check_variants, measure_fit, stretched_from
from scaleinv.hf.convert import load_tokenizer
from scaleinv.hf.source import load_pretrained
from scaleinv.hf.stretch import trained_length
from scaleinv.hub import check_source
from scaleinv.machine import arithmetic, cpu_name
from scaleinv.progress import Progress, silent
from scaleinv.train.distributed import World, world
from scaleinv.train.store import check_writable
from scaleinv.train.validation import LengthLoss, usable_tokens
from scaleinv.version import VERSION

COUNTED = 65_536
"""Held-out tokens used to count the bytes per token."""


def adapt(config: AdaptConfig, progress: Progress = silent, command: str | None = None) -> Summary:
    """Adapt a model, or do the rest of it; writes and returns the summary of after training.

    If it is interrupted, the same call resumes it: training goes on from its last checkpoint, and what is finished is
    not repeated. Under torchrun every rank calls this with the same arguments.

    Args:
        command: what the user typed, for the record.
    """
    check_source(config.model)
    if config.lora:
        require_peft()
    with contextlib.ExitStack() as stack:
        here = stack.enter_context(world(config.device))
        check_sharding(config, PartialState(cpu=here.device.type == "cpu"))  # accelerate joins the group that is there
        work = _Work(config, here, progress if here.first else silent)
        out = Path(config.out)
        here.on_first(check_writable, out)
        here.on_first(lambda: stack.enter_context(locked(out)))
        check_shared(out, here)
        usual = {"precision": arithmetic("auto", here.device.type)}
        here.on_first(folders.claim, out, work.identity(), usual)
        here.on_first(folders.remove_leftovers, out)
        return work.run(out, command)


def check_sharding(config: AdaptConfig, state: PartialState) -> None:
    """Raise ValueError where accelerate would not shard the model, or would shard it in a way that loses weights."""
    # By default accelerate's launcher has most ranks load no weights, and gathers none at the end.
    if "FSDP_VERSION" in os.environ:
        raise ValueError(
            "adapt sets FSDP up itself: start it with torchrun and --fsdp, not accelerate launch --use_fsdp"
        )
    if config.fsdp and state.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU):
        raise ValueError(
            "fsdp needs several ranks on GPUs (torchrun --nproc-per-node 8): accelerate does not shard over CPUs, "
            f"got {state.num_processes} on {state.device.type}"
        )


class _Work:
    """What an adaptation works with; made before anything is written, and raises ValueError for what cannot work."""

    def __init__(self, config: AdaptConfig, here: World, progress: Progress) -> None:
        self.config, self.here, self.progress = config, here, progress
        self.tokenizer = load_tokenizer(config.model)
        if self.tokenizer is None:
            raise ValueError(f"{config.model} has no tokenizer, which the data need")
        self.stock = load_pretrained(config.model).eval()
        text = self.stock.config.get_text_config()
        self.train_length = config.train_length or min(trained_length(text), LONGEST)
        self.lengths = lengths.parse(config.lengths, self.train_length)
        check_lengths(text, [self.train_length, *self.lengths.values()], config.model)
        if config.distill and self.train_length > trained_length(text):
            raise ValueError(
                f"distill: the stock model teaches at up to {trained_length(text):,} tokens, its trained length, "
                f"got train_length {self.train_length:,}"
            )
        check_variants(self.stock, config, self.train_length)
        stretches = any(variant(name).stretch for name in config.names)
        self.stretched_beyond = stretched_from(text, self.train_length) if stretches else None
        self.unstretched: dict[tuple[Path, str, int], dict[str, LengthLoss]] = {}
        """Losses of the last model at the lengths where a stretch leaves it as it is."""
        self.steps = Steps.of(config, self.train_length, here.size)
        with here.first_goes_first():
            self.data: Splits = load_splits(
                config.data, config.val_data, self.tokenizer, text.vocab_size, progress=progress
            )
        if self.data.train.total <= self.train_length:
            raise ValueError(
                f"data {config.data!r} has {self.data.train.total:,} tokens to train on, fewer than one window of "
                f"train_length {self.train_length:,}"
            )
        longest = max(self.lengths.values())
        if config.val_tokens < longest:
            raise ValueError(f"val_tokens must cover the longest of lengths, {longest:,}, got {config.val_tokens:,}")
        if self.data.val.total <= longest:
            held = f"val_data {config.val_data!r}" if config.val_data else f"the held-out part of data {config.data!r}"
            raise ValueError(
                f"{held} has {self.data.val.total:,} tokens, fewer than one window of the longest of lengths, "
                f"{longest:,}"
            )
        self.tokens = usable_tokens(self.data.val.total, config.val_tokens, list(self.lengths.values()))
        progress(
            f"{config.model}: {sum(x.numel() for x in self.stock.parameters()):,} parameters; {config.data}: "
            f"{self.data.train.total:,} tokens to train on, {self.data.val.total:,} held out"
        )
        fitted = any(variant(name).fitted for name in config.names)
        self.fit = measure_fit(self.stock.to(here.device), self.data.train, self.train_length) if fitted else None

    def identity(self) -> dict[str, Any]:
        """What the trained models depend on."""
        config = self.config
        kept = ("batch_tokens", "lr", "lora", "tau", "p", "distill")
        return {
            "model_sha256": fingerprint(self.stock),
            "corpus_sha256": self.data.sha256,
            "train_length": self.train_length,
            "training_tokens": config.training_tokens,
            "precision": arithmetic(config.precision, self.here.device.type),
            **{name: getattr(config, name) for name in kept},
        }

    def run(self, out: Path, command: str | None) -> Summary:
        config, here = self.config, self.here
        settings = self.settings(command)
        for name in config.names:
            self.evaluate(out / "before", self.stock, name, 0)
        sum_up = functools.partial(folders.summarize, lengths=self.lengths, tokens=self.tokens)
        untrained = {**settings, "trained": False}
        here.on_first(lambda: sum_up(out / "before", seeds=1, settings=untrained))  # no seed makes a difference yet
        del self.stock
        for seed in range(config.seeds):
            for model, names in config.served().items():
                self.train(out, model, seed)
                self.finish(out, model, seed, [name for name in names if not self._whole(out, name, seed)])
                here.on_first(lambda: sum_up(out, seeds=config.seeds, settings=settings))
        here.on_first(folders.remove_checkpoints, out)
        return sum_up(out, seeds=config.seeds, settings=settings) if here.first else Summary()

    def train(self, out: Path, name: str, seed: int) -> None:
        """Train a model, unless that is done."""
        folder = folders.model_folder(out, name, seed)
        if self._exists(folder):
            return
        checkpoints = out / folders.CHECKPOINTS / folder.name
        making = folders.making(folder)
        data, steps, here = self.data.train, self.steps, self.here
        lines = train(self.config, name, seed, data, steps, here, checkpoints, making, self.progress, self.fit)
        gc.collect()  # Trainer and its model refer to each other, and the next model needs the memory
        if here.device.type == "cuda":
            torch.cuda.empty_cache()

        def finish() -> None:
            self.tokenizer.save_pretrained(making)
            text = "".join(f"{_line(line)}\n" for line in lines)
            write_text(out / "curves" / f"{folder.name}.jsonl", text)
            folders.remove_served(out, name, seed)
            os.replace(making, folder)
            shutil.rmtree(checkpoints, ignore_errors=True)

        here.on_first(finish)

    def finish(self, out: Path, trained: str, seed: int, names: list[str]) -> None:
        """Evaluate a trained model as each variant, and save it as such."""
        if not names:
            return
        folder = folders.model_folder(out, trained, seed)
        try:
            model = load_pretrained(folder).eval()
        except ValueError as error:
            raise ValueError(f"{error}; delete {folder} to train it again") from error
        for name in names:
            self.evaluate(out, model, name, seed)
            self.here.on_first(self.save_variant, out, model, name, seed)

    def evaluate(self, out: Path, model: Any, name: str, seed: int) -> None:
        """The loss of a model as a variant, unless it is known."""
        if self._done(out, name, seed):
            return
        as_variant(model, name, self.config, self.train_length, self.fit)
        label = f"{name} seed {seed}" if out == Path(self.config.out) else f"{name} before training"
        key = (out, trained_as(name), seed)
        same = self.unstretched.get(key, {}) if variant(name).stretch else {}
        rest = {length: count for length, count in self.lengths.items() if length not in same}
        found = losses_by_length(model, self.data.val, rest, self.tokens, self.here, label, self.progress)
        found = {length: same.get(length) or found[length] for length in self.lengths}
        if not variant(name).stretch:
            beyond = self.stretched_beyond or 0
            self.unstretched = {key: {length: at for length, at in found.items() if at.length <= beyond}}
        result = Evaluation(name, seed, trained_as(name), self.train_length, None, None, self.tokens, found)
        self.here.on_first(result.save, out / "evaluations")

    def save_variant(self, out: Path, model: Any, name: str, seed: int) -> None:
        """A folder for a variant that only acts at inference."""
        folder = folders.model_folder(out, name, seed)
        if not folder.exists():
            as_variant(model, name, self.config, self.train_length, self.fit)
            source = folders.model_folder(out, trained_as(name), seed)
            folders.link_folder(source, folder, model.config.save_pretrained)

    def _done(self, out: Path, name: str, seed: int) -> bool:
        found = False
        if self.here.first:
            found = folders.evaluated(out, name, seed, self.lengths, self.tokens) is not None
        return self.here.any(found)

    def _whole(self, out: Path, name: str, seed: int) -> bool:
        return self._done(out, name, seed) and self._exists(folders.model_folder(out, name, seed))

    def _exists(self, path: Path) -> bool:
        """Whether rank 0 sees a path: over a network others may see it later, and all must do the same."""
        return self.here.any(self.here.first and path.exists())

    def settings(self, command: str | None) -> dict[str, Any]:
        """How the numbers were made, for summary.json and its page."""
        config = self.config
        return {
            "command": command,
            "data": config.data,
            "val_data": config.val_data,
            **self.identity(),
            "batch_tokens": self.steps.tokens,
            "model": Path(config.model).name if Path(config.model).is_dir() else config.model,
            "parameters": {name: sum(x.numel() for x in self.stock.parameters()) for name in config.served()},
            "steps": self.steps.count,
            "stretched_beyond": self.stretched_beyond,
            "lengths": config.lengths,
            "validation_tokens": self.tokens,
            "tokens": self._unit(),
            "machine": f"{cpu_name()}, {os.cpu_count()} cores, {self.here.size} ranks on {self.here.device.type}",
            "versions": {
                "scaleinv": VERSION,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
        }

    def _unit(self) -> dict[str, Any]:
        """The unit of a loss: the tokenizer, and how many bytes of the held-out text a token stands for."""
        ids = self.data.val.read(0, min(self.data.val.total, COUNTED)).tolist()
        text = self.tokenizer.decode([i for i in ids if i != self.data.val.end_of_text])
        size = len(text.encode("utf-8", "replace")) / len(ids)
        name = Path(self.config.model).name
        return {"tokenizer": name, "vocabulary": len(self.tokenizer), "bytes_per_token": round(size, 4)}


def fingerprint(model: Any) -> str:
    """A hash of a model's config and of a few values of each weight; where it lies and who saved it do not count."""
    digest = hashlib.sha256(json.dumps(_settings_of(model.config.to_diff_dict()), sort_keys=True, default=str).encode())
    for name, weight in model.named_parameters():
        values = weight.detach().flatten()
        few = values[:: max(1, len(values) // 16)].to("cpu", torch.float32)
        digest.update(f"{name} {tuple(weight.shape)} {few.tolist()}".encode())
    return digest.hexdigest()


def _settings_of(config: Any) -> Any:
    """A config, and those inside it, without paths and versions."""
    if not isinstance(config, dict):
        return config
    dropped = ("_name_or_path", "transformers_version")
    return {str(name): _settings_of(value) for name, value in config.items() if name not in dropped}


def check_shared(out: Path, here: World) -> None:
    """Raise ValueError on every rank unless each sees the folder that rank 0 holds."""
    if here.any(not (out / LOCK).exists()):
        raise ValueError(f"out must be a folder that all nodes share, got {out}, which some rank does not see")


def _line(values: dict[str, Any]) -> str:
    """A line of a curve: what is not known is left out, and a loss that is not finite is null."""
    known = {name: value for name, value in values.items() if value is not None}
    return json.dumps({name: value if math.isfinite(value) else None for name, value in known.items()})
