"""The shape of a GPT, and the presets."""

from __future__ import annotations

import dataclasses
import math

from scaleinv import methods
from scaleinv.constants import TAU


@dataclasses.dataclass
class GPTConfig:
    """All that is needed to build a `GPT`; plain values, so that it can be kept as JSON."""

    layers: int = 4
    width: int = 128
    heads: int = 2
    vocab_size: int = 257
    method: str = "scale-invariant-p-rope"
    """A row of `scaleinv.methods`."""
    train_length: int = 512
    """Tokens in a training sequence: p-RoPE's base and the start of NTK and YaRN follow from it."""
    tau: float = TAU
    learnable_tau: bool = False
    rope_base: float = 10_000.0
    p: float = 0.5
    p_rope_base: float | None = None
    """None for train_length / 4."""
    segment: int | None = None
    """Infini-attention's segment in tokens; None for train_length / 4."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "vocab_size", "train_length"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} must split into heads={self.heads} heads of even size")
        if self.segment is not None and self.segment < 1:
            raise ValueError(f"segment must be positive, got {self.segment}")
        if not (math.isfinite(self.tau) and self.tau > 0):
            raise ValueError(f"tau must be positive and finite, got {self.tau}")
        methods.row(self.method)

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def sized_method(self) -> methods.Method:
        """The method's rotary and a fresh logit transform, sized for this model."""
        return methods.get(
            self.method,
            heads=self.heads,
            head_dim=self.head_dim,
            train_length=self.train_length,
            tau=self.tau,
            rope_base=self.rope_base,
            p=self.p,
            p_rope_base=self.p_rope_base,
            learnable_tau=self.learnable_tau,
        )


PRESETS: dict[str, GPTConfig] = {
    "mini": GPTConfig(),
    "162m": GPTConfig(layers=12, width=768, heads=6, vocab_size=50_304, train_length=4096),
    "304m": GPTConfig(layers=16, width=1024, heads=8, vocab_size=50_304, train_length=4096),
}


def preset(name: str, **changes: object) -> GPTConfig:
    """A preset by name, with fields changed: ``preset("162m", method="alibi")``."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}: known are {', '.join(PRESETS)}")
    return dataclasses.replace(PRESETS[name], **changes)  # type: ignore[arg-type]
