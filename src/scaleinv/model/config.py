"""The shape of a GPT, and the presets."""

from __future__ import annotations

import dataclasses

from scaleinv import methods
from scaleinv.constants import TAU
from scaleinv.settings import check, setting


@dataclasses.dataclass
class GPTConfig:
    """All that is needed to build a `GPT`; plain values, so that it can be kept as JSON."""

    layers: int = setting(4, "transformer blocks", group="model", least=1, most=10_000)
    width: int = setting(128, "channels of the residual stream", group="model", least=1, most=2**20)
    heads: int = setting(2, "attention heads; they share the width", group="model", least=1, most=2**16)
    vocab_size: int = setting(
        257, "tokens in the vocabulary; at 257 or less, the data's own number", group="model", least=1, most=2**24
    )
    method: str = setting("scale-invariant-p-rope", "a method's name, see `scaleinv methods`", group="model")
    train_length: int = setting(
        512,
        "tokens per training sequence; p-RoPE's base, NTK and YaRN depend on it",
        group="model",
        least=1,
        most=2**31,
    )
    tau: float = setting(TAU, "lengthscale of the scale-invariant methods, in tokens", group="model", above=0)
    learnable_tau: bool = setting(False, "learn a lengthscale for each head, starting at tau", group="model")
    rope_base: float = setting(10_000.0, "base of RoPE", group="model", above=1)
    p: float = setting(0.5, "share of the channel pairs that p-RoPE turns", group="model", least=0, most=1)
    p_rope_base: float | None = setting(None, "base of p-RoPE", unset="train-length / 4", group="model", above=1)
    segment: int | None = setting(
        None, "Infini-attention's segment, in tokens", unset="train-length / 4", group="model", least=1, most=2**31
    )

    def __post_init__(self) -> None:
        check(self)
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} must split into heads={self.heads} heads of even size")
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
    "small": GPTConfig(layers=6, width=96, heads=3, vocab_size=50_304, train_length=1024),
    "162m": GPTConfig(layers=12, width=768, heads=6, vocab_size=50_304, train_length=4096),
    "304m": GPTConfig(layers=16, width=1024, heads=8, vocab_size=50_304, train_length=4096),
}


def preset(name: str, **changes: object) -> GPTConfig:
    """A preset by name, with fields changed: ``preset("162m", method="alibi")``."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}: known are {', '.join(PRESETS)}")
    return dataclasses.replace(PRESETS[name], **changes)  # type: ignore[arg-type]
