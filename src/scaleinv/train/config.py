"""Everything a training run depends on, as one dataclass, and the presets."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from scaleinv.model.config import GPTConfig
from scaleinv.model.config import preset as model_preset


@dataclasses.dataclass
class TrainConfig:
    """A training run. Plain values: `to_json` and `from_json` keep it beside the checkpoints."""

    model: GPTConfig = dataclasses.field(default_factory=GPTConfig)
    data: str = "stdlib"
    """A corpus by name, text files, token shards, or a Hugging Face dataset: see `scaleinv.data.load_corpus`."""
    val_data: str | None = None
    tokenizer: str | None = None
    """bytes, gpt2, bpe, bpe:SIZE or a folder; None for the data's own (bytes for text)."""
    out: str = "runs/mini"
    seed: int = 0

    steps: int = 600
    batch_tokens: int = 4096
    """Tokens in one optimiser step, over all ranks."""
    micro_tokens: int | None = None
    """Tokens in one forward pass of one rank; None for 65,536 on a GPU and 16,384 on a CPU."""
    document_masks: bool = False
    """Documents in a window do not see each other; the paper leaves this off."""

    schedule: Literal["linear", "cosine"] = "linear"
    """linear: constant, then linear to 0 over the last ``decay`` of the steps; cosine: to 0 over all of them."""
    decay: float = 0.4
    lr_matrices: float = 0.02
    lr_embedding: float = 0.1
    lr_output: float = 0.005
    """Output layer, and the few scalars that some methods learn."""
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float | None = None
    """Largest norm of the gradient; None to leave it as it is."""

    val_every: int = 100
    val_tokens: int = 131_072
    val_multiples: tuple[int, ...] = (1, 4, 16)
    """Validation lengths, in multiples of the training length."""
    checkpoint_every: int = 100
    keep: int = 3
    """Checkpoints to keep."""
    log_every: int = 10

    device: str = "auto"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    compile: bool | None = None
    """torch.compile the model; None for: on a GPU."""
    wandb: str | None = None
    """A Weights & Biases project to report to."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_tokens", "val_every", "val_tokens", "checkpoint_every", "keep", "log_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        for name in ("lr_matrices", "lr_embedding", "lr_output"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and not negative, got {value!r}")
        if self.schedule not in ("linear", "cosine"):
            raise ValueError(f"schedule must be 'linear' or 'cosine', got {self.schedule!r}")
        if self.parallel not in ("ddp", "fsdp"):
            raise ValueError(f"parallel must be 'ddp' or 'fsdp', got {self.parallel!r}")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay must lie between 0 and 1, got {self.decay}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be positive or None, got {self.clip}")
        if self.batch_tokens % self.model.train_length:
            raise ValueError(
                f"batch_tokens must be a multiple of the training length {self.model.train_length}, "
                f"got {self.batch_tokens}"
            )
        if not self.val_multiples or any(not isinstance(x, int) or x < 1 for x in self.val_multiples):
            raise ValueError(f"val_multiples must be positive integers, got {self.val_multiples!r}")
        if self.document_masks and self.model.sized_method().infini:
            raise ValueError("document_masks cannot be used with Infini-attention: its memory spans the window")

    @property
    def sequences(self) -> int:
        """Sequences in one optimiser step, over all ranks."""
        return self.batch_tokens // self.model.train_length

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
        values = dict(values)
        values["model"] = GPTConfig(**values["model"])
        for name in ("betas", "val_multiples"):
            values[name] = tuple(values[name])
        return TrainConfig(**values)


def preset(name: str, method: str = "scale-invariant-p-rope", train_length: int | None = None) -> TrainConfig:
    """The run of a preset: "mini" (minutes on a CPU), and the paper's "162m" and "304m"."""
    changes: dict[str, Any] = {"method": method}
    if train_length is not None:
        changes["train_length"] = train_length
    model = model_preset(name, **changes)
    if name == "mini":
        length = model.train_length
        batch = -(-4096 // length) * length  # whole sequences
        return TrainConfig(model=model, batch_tokens=batch, val_every=200, val_tokens=max(65_536, 16 * length))
    paper = TrainConfig(
        model=model,
        steps=4578,
        batch_tokens=524_288,
        decay=1308 / 4578,
        lr_embedding=0.3,
        lr_output=0.002,
        val_every=125,
        val_tokens=10_485_760,
        checkpoint_every=125,
    )
    if name == "162m":
        return paper
    return dataclasses.replace(
        paper, steps=10_900, batch_tokens=917_504, schedule="cosine", lr_matrices=0.02 * 768 / 1024, val_every=250
    )
