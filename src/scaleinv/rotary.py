"""Rotary position encodings: RoPE, p-RoPE, NoPE, and RoPE changed at inference by dynamic NTK or YaRN.

A rotary encoding is a vector of frequencies: channel pairs (k, k + d/2) of query and key turn by ``position ·
frequency``. Frequencies stay in float32 and angles are computed in float64, whatever the model's dtype: at position
100,000 a bfloat16 angle means nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Rotary:
    """Rotation by given frequencies.

    Not an `nn.Module`: there is nothing to train or to save. Frequencies stay on the CPU, whatever the default device,
    and a cast of the model cannot round them.

    Args:
        frequencies: radians per token, ``[d/2]``; 0 leaves a channel pair alone.
        attention_factor: multiplies cos and sin (YaRN), so that scores grow by its square.
    """

    def __init__(self, frequencies: Tensor, attention_factor: float = 1.0) -> None:
        self.frequencies = frequencies.to(torch.float32)
        self.attention_factor = float(attention_factor)

    @property
    def dim(self) -> int:
        """Head dimension."""
        return 2 * self.frequencies.numel()

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin ``[..., N, d/2]`` in float32 at integer positions ``[..., N]``; for use with `rotate`."""
        if positions.is_floating_point() or positions.dtype == torch.bool:
            raise TypeError(f"positions must be an integer tensor, got {positions.dtype}")
        frequencies = self.frequencies.to(device=positions.device, dtype=torch.float64)
        angles = positions[..., None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        return (cos * self.attention_factor).to(torch.float32), (sin * self.attention_factor).to(torch.float32)

    def apply(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate ``x [B, H, N, d]`` to positions ``[N]`` or ``[B, N]``; the result has x's dtype."""
        if x.shape[-1] != self.dim:
            raise ValueError(f"x must have head dimension {self.dim}, got {x.shape[-1]}")
        batch, length = x.shape[0], x.shape[-2]
        if tuple(positions.shape) not in ((length,), (1, length), (batch, length)):
            raise ValueError(
                f"positions must be [{length}] or [{batch}, {length}] for this x, got {[*positions.shape]}"
            )
        cos, sin = self.cos_sin(positions)
        if positions.dim() == 2:  # one row for each sequence: [B, 1, N, d/2]
            cos, sin = cos[:, None], sin[:, None]
        return rotate(x, cos, sin)

    def __repr__(self) -> str:
        turning = int((self.frequencies != 0).sum())
        return f"{type(self).__name__}(dim={self.dim}, turning={turning} of {self.dim // 2} pairs)"


class RoPE(Rotary):
    """Rotary embedding (Su et al. 2021, arXiv 2104.09864): frequencies base^(-2k/d)."""

    def __init__(self, dim: int, base: float = 10_000.0) -> None:
        _check(dim, base)
        super().__init__(_rope_frequencies(dim, base))
        self.base = float(base)


class PRoPE(Rotary):
    """p-RoPE (Barbero et al. 2024, arXiv 2410.06205): only the fraction p of high frequencies turns.

    The kept frequencies run geometrically from 1 down to 1/base, both included; the other channels carry only content.
    The scale-invariant paper uses ``p=0.5, base=1024`` at 4,096 tokens. That keeps the longest wavelength at about
    1.5 × the training length, so use ``base = train_length / 4`` at other lengths.
    """

    def __init__(self, dim: int, p: float = 0.5, base: float = 1024.0) -> None:
        _check(dim, base)
        if not 0 <= p <= 1:
            raise ValueError(f"p must lie between 0 and 1, got {p}")
        kept = round(p * dim / 2)
        exponents = torch.arange(kept, dtype=torch.float64, device="cpu") / max(kept - 1, 1)
        frequencies = torch.zeros(dim // 2, dtype=torch.float64, device="cpu")
        frequencies[:kept] = float(base) ** -exponents
        super().__init__(frequencies)
        self.base, self.p = float(base), float(p)


class NoPE(Rotary):
    """No position encoding: only the logit transform may depend on the distance."""

    def __init__(self) -> None:
        super().__init__(torch.empty(0, device="cpu"))

    def apply(self, x: Tensor, positions: Tensor) -> Tensor:
        """x itself."""
        return x

    def __repr__(self) -> str:
        return "NoPE()"


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel pairs (k, k + d/2) of ``x [..., N, d]`` by angles whose cos and sin are ``[..., N, d/2]``."""
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def ntk(rope: RoPE, length: int, train_length: int) -> Rotary:
    """Dynamic NTK: `rope` for a context of ``length`` tokens, when it was trained on ``train_length``.

    The base becomes ``base · (length/train_length)^(d/(d-2))``; at or below the training length nothing changes.
    """
    _check_lengths(rope, length, train_length)
    if length <= train_length:
        return rope
    if rope.dim == 2:
        raise ValueError("rope must have a head dimension above 2: NTK leaves its only frequency, 1, alone")
    return RoPE(rope.dim, rope.base * (length / train_length) ** (rope.dim / (rope.dim - 2)))


def yarn(
    rope: RoPE,
    length: int,
    train_length: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    *,
    attention_factor: bool = True,
) -> Rotary:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): `rope` for ``length`` tokens, trained on ``train_length``.

    Channels that turn more than ``beta_fast`` times over the training length keep their frequency, those under
    ``beta_slow`` turns are slowed by ``s = length/train_length``, and between them a linear ramp mixes the two. cos and
    sin grow by ``0.1 ln(s) + 1``. ``attention_factor=False`` turns that off, for logits that already sharpen with the
    length. At or below the training length nothing changes.
    """
    _check_lengths(rope, length, train_length)
    if not beta_fast > beta_slow > 0:
        raise ValueError(f"beta_fast must exceed beta_slow, both positive, got {beta_fast} and {beta_slow}")
    if length <= train_length:
        return rope
    factor = length / train_length

    def channel(turns: float) -> float:
        """The (fractional) pair whose wavelength fits `turns` times into the training length."""
        return rope.dim * math.log(train_length / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    low = max(math.floor(channel(beta_fast)), 0)
    high = min(math.ceil(channel(beta_slow)), rope.dim - 1)
    pairs = torch.arange(rope.dim // 2, dtype=torch.float64, device="cpu")
    slowed = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    own = _rope_frequencies(rope.dim, rope.base)
    growth = 0.1 * math.log(factor) + 1 if attention_factor else 1.0
    return Rotary(own * (1 - slowed) + own / factor * slowed, attention_factor=growth)


def _rope_frequencies(dim: int, base: float) -> Tensor:
    return float(base) ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)


def _check(dim: int, base: float) -> None:
    if not isinstance(dim, int) or dim < 2 or dim % 2:
        raise ValueError(f"dim must be a positive even integer, got {dim!r}")
    if not (math.isfinite(base) and base > 1):
        raise ValueError(f"base must be finite and greater than 1, got {base}")


def _check_lengths(rope: RoPE, length: int, train_length: int) -> None:
    if not isinstance(rope, RoPE):
        raise TypeError(f"rope must be a RoPE, got {type(rope).__name__}")
    for name, value in (("length", length), ("train_length", train_length)):
        if value < 1:
            raise ValueError(f"{name} must be positive, got {value}")
