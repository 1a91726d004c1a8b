"""Logit transforms: plain, scale-invariant, LogN, ALiBi, and a user's own tables.

Each is affine in the score, with coefficients that depend on the distance t, the query i and the head h:

    L = a_h(t) · (c_h(i) · S) + m_h(t)        S = q·k/√d

`LogitTransform.tables` gives the gain a and the shift m, `LogitTransform.query_gain` gives c. Any subclass that fills
these two in runs on every backend, gradients included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from scaleinv import schedule


class LogitTransform(nn.Module):
    """Base class: a and m from the distance, c from the query."""

    heads: int | None = None
    """Number of query heads this transform is made for; None where all heads share it."""

    counts: Literal["visible", "context"] | None = None
    """Which keys `query_gain` counts: those that the query sees, or all in the context; None where c = 1."""

    def tables(self, length: int, *, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Gain a and shift m at distances 0 … length-1, each ``[heads or 1, length]``."""
        raise NotImplementedError

    def table_range(self, start: int, stop: int, *, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """`tables` at distances start … stop-1. Override it if that is cheaper than the whole table."""
        gain, shift = self.tables(stop, dtype=dtype, device=device)
        return gain[..., start:], shift[..., start:]

    def query_gain(self, count: Tensor) -> Tensor:
        """c for each query, ``[B or 1, heads, Nq]``, from its count of keys ``[B or 1, Nq]`` (see `counts`)."""
        raise NotImplementedError(f"{type(self).__name__} sets counts={self.counts!r} but has no query_gain")

    def gain_of_queries(self, visible: Callable[[], Tensor], context: int) -> Tensor | None:
        """c for each query, ``[B or 1, heads, Nq]``; None where c = 1.

        Args:
            visible: gives the number of keys that each query sees, ``[B or 1, Nq]``.
            context: the number of keys up to the last query.
        """
        if self.counts is None:
            return None
        count = visible()
        return self.query_gain(count if self.counts == "visible" else torch.full_like(count, max(context, 1)))


class _FixedTables(LogitTransform):
    """Tables without parameters: computed once per device and dtype, and grown in powers of two.

    Distances beyond `KEPT` are recomputed for each call.
    """

    KEPT = 1 << 20

    def __init__(self) -> None:
        super().__init__()
        self._cache: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def compute(self, distance: Tensor) -> tuple[Tensor, Tensor]:
        """a and m ``[heads or 1, T]`` at float64 distances ``[T]``."""
        raise NotImplementedError

    def tables(self, length: int, *, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        return self.table_range(0, length, dtype=dtype, device=device)

    def table_range(self, start: int, stop: int, *, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():  # the compiler fuses these; a cache would only add guards
            return self._computed(start, stop, dtype, device)
        device = torch.device(device)
        cached = self._cache.get((dtype, device))
        if cached is None or cached[0].shape[-1] < stop:
            # Not under inference_mode: an inference tensor in the cache would break a later training step.
            with torch.inference_mode(False), torch.no_grad():
                if start > self.KEPT:
                    return self._computed(start, stop, dtype, device)
                cached = self._computed(0, 1 << max(stop - 1, 1).bit_length(), dtype, device)
            self._cache[dtype, device] = cached
        gain, shift = cached
        return gain[:, start:stop], shift[:, start:stop]

    def _computed(self, start: int, stop: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        # Added in float64: `arange` from a far start loses entries, and with them the table's length.
        distance = torch.arange(stop - start, dtype=torch.float64, device=device) + start
        gain, shift = self.compute(distance)
        return gain.to(dtype), shift.to(dtype)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_cache": {}}  # a copy or a pickle makes its own


class Plain(_FixedTables):
    """Ordinary attention: L = S."""

    def compute(self, distance: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(distance)[None], torch.zeros_like(distance)[None]


class ALiBi(_FixedTables):
    """Linear biases (Press et al. 2021, arXiv 2108.12409): L = S - slope_h · t, slopes 2^(-8h/H)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = _positive_int("heads", heads)

    def compute(self, distance: Tensor) -> tuple[Tensor, Tensor]:
        assert self.heads is not None
        slopes = alibi_slopes(self.heads).to(distance.device)
        return torch.ones_like(distance)[None], -slopes[:, None] * distance

    def extra_repr(self) -> str:
        return f"heads={self.heads}"


class ScaleInvariant(_FixedTables):
    """Scale-invariant attention (arXiv 2505.17083): a and m of `scaleinv.schedule.coefficients`.

    Args:
        tau: the lengthscale in tokens; a sequence gives one for each head.
        alpha, beta: heights of the expected weight and negentropy; the defaults leave t = 0 alone (a = 1, m = 0).
        heads: number of query heads; None for one lengthscale that all heads share.
        learnable: learn one lengthscale for each head (through log tau); takes ``heads``.
    """

    def __init__(
        self,
        tau: float | Sequence[float] | Tensor = schedule.TAU,
        alpha: float = schedule.HEIGHT,
        beta: float = schedule.HEIGHT,
        heads: int | None = None,
        learnable: bool = False,
    ) -> None:
        super().__init__()
        schedule.check_parameters(tau, alpha, beta)
        if isinstance(tau, Tensor) and tau.dim() > 1:
            raise ValueError(f"tau must be a number or one number for each head, got shape {tuple(tau.shape)}")
        values = schedule.lengthscales(tau)
        shared = not isinstance(tau, Sequence) and not (isinstance(tau, Tensor) and tau.dim() == 1)
        if heads is None and not shared:
            heads = len(values)
        if heads is None and learnable:
            raise ValueError("learnable=True needs heads, the number of query heads")
        if heads is not None:
            _positive_int("heads", heads)
            if len(values) not in (1, heads):
                raise ValueError(f"tau must hold one number or heads={heads} numbers, got {len(values)}")
            values = values * heads if len(values) == 1 else values
        if learnable and beta == alpha * math.log(alpha):
            raise ValueError("beta must exceed alpha * log(alpha) with learnable=True: there a_0 = 0 has no gradient")
        self.heads, self.alpha, self.beta, self.learnable = heads, float(alpha), float(beta), bool(learnable)
        # Plain numbers, not a tensor: a model made on the meta device, or cast to bfloat16, must not lose them.
        self.values = values
        if learnable:
            self.log_tau = nn.Parameter(torch.tensor(values).log())

    @property
    def tau(self) -> Tensor:
        """The lengthscale in tokens, float64: a scalar, or ``[heads]``."""
        if self.learnable:
            return self.log_tau.to(torch.float64).exp()
        tau = torch.tensor(self.values, dtype=torch.float64, device="cpu")
        return tau if self.heads is not None else tau.squeeze(0)

    def compute(self, distance: Tensor) -> tuple[Tensor, Tensor]:
        tau = self.tau.to(distance.device).reshape(-1, 1)
        return schedule.unchecked_coefficients(distance, tau, self.alpha, self.beta)

    def table_range(self, start: int, stop: int, *, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        if self.learnable:
            return self._computed(start, stop, dtype, device)
        return super().table_range(start, stop, dtype=dtype, device=device)

    def extra_repr(self) -> str:
        tau = self.tau.detach().tolist()
        return f"tau={tau}, alpha={self.alpha:.6g}, beta={self.beta:.6g}, learnable={self.learnable}"


class FittedScaleInvariant(_FixedTables):
    """Scale-invariant attention for scores of any mean and variance: `scaleinv.schedule.fitted_coefficients`.

    With mean 0 and variance 1 it is `ScaleInvariant`. Models that were trained without QK-norm have other scores.

    Args:
        mean, variance: of the scores of each query head.
        tau: the lengthscale in tokens, which all heads share.
    """

    def __init__(self, mean: Sequence[float] | Tensor, variance: Sequence[float] | Tensor, tau: float = schedule.TAU):
        super().__init__()
        schedule.check_parameters(tau, schedule.HEIGHT, schedule.HEIGHT)
        # Plain numbers, not buffers: a cast of the model must not round them.
        self.mean, self.variance = (torch.as_tensor(x, dtype=torch.float64).tolist() for x in (mean, variance))
        for name, values in (("mean", self.mean), ("variance", self.variance)):
            if not isinstance(values, list) or not all(isinstance(value, float) for value in values):
                raise ValueError(f"{name} must hold one number for each head, got {values}")
        schedule.check_moments(self.mean, self.variance)
        if len(self.mean) != len(self.variance):
            raise ValueError(
                f"mean and variance must have as many heads, got {len(self.mean)} and {len(self.variance)}"
            )
        self.heads, self.tau = _positive_int("heads", len(self.mean)), float(tau)

    def compute(self, distance: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = (
            torch.tensor(x, dtype=torch.float64, device=distance.device)[:, None] for x in (self.mean, self.variance)
        )
        return schedule.unchecked_fitted_coefficients(distance, self.tau, mean, variance)

    def extra_repr(self) -> str:
        return f"tau={self.tau:g}, mean={self.mean}, variance={self.variance}"


class LogN(Plain):
    """LogN / SSMax (Nakanishi 2025, arXiv 2501.19399): L = s_h · log(n) · S, with s_h learned.

    Args:
        heads: number of query heads.
        scale: initial s_h.
        counts: n is the number of keys that the query sees (``"visible"``, SSMax's causal form), or the number of
            keys in the context up to the last query (``"context"``: it grows as a cache grows, so that decoding step
            by step and one forward over the whole text differ by design).
        learnable: learn s_h.
    """

    def __init__(
        self,
        heads: int,
        scale: float = 0.4,
        counts: Literal["visible", "context"] = "visible",
        learnable: bool = True,
    ) -> None:
        super().__init__()
        self.heads = _positive_int("heads", heads)
        if not math.isfinite(scale):
            raise ValueError(f"scale must be finite, got {scale}")
        if counts not in ("visible", "context"):
            raise ValueError(f"counts must be 'visible' or 'context', got {counts!r}")
        self.counts = counts
        self.scale = nn.Parameter(torch.full((heads,), float(scale)), requires_grad=learnable)

    def query_gain(self, count: Tensor) -> Tensor:
        # In float64, whatever the model's dtype: a count of 70,000 is infinite in float16. The caller rounds once.
        scale = self.scale.to(device=count.device, dtype=torch.float64)
        return scale[:, None] * count.clamp_min(1).to(torch.float64).log()[:, None, :]

    def extra_repr(self) -> str:
        return f"heads={self.heads}, counts={self.counts!r}, learnable={self.scale.requires_grad}"


class DistanceTable(LogitTransform):
    """A user's own a and m, as tables over the distance ``[H or 1, T]``; gradients reach them.

    Pass tensors to use as they are, or `nn.Parameter` to train. A distance of T or more raises ValueError: nothing
    is extrapolated.
    """

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        for name, table in (("scale", scale), ("shift", shift)):
            if not isinstance(table, Tensor) or not table.is_floating_point():
                raise TypeError(f"{name} must be a floating-point tensor, got {_describe(table)}")
            if table.dim() != 2 or table.numel() == 0:
                raise ValueError(f"{name} must have shape [heads or 1, T], got {tuple(table.shape)}")
        heads = max(scale.shape[0], shift.shape[0])
        if scale.shape[1] != shift.shape[1] or {scale.shape[0], shift.shape[0]} - {1, heads}:
            raise ValueError(f"scale {tuple(scale.shape)} and shift {tuple(shift.shape)} must have equal T and heads")
        self.heads = heads if heads > 1 else None
        self.scale = self._hold("scale", scale)
        self.shift = self._hold("shift", shift)

    def _hold(self, name: str, table: Tensor) -> Tensor:
        if not isinstance(table, nn.Parameter):
            self.register_buffer(name, table)
        return table

    def tables(self, length: int, *, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        held = self.scale.shape[-1]
        if held < length:
            raise ValueError(f"DistanceTable holds distances 0 … {held - 1}, but this call needs up to {length - 1}")
        return (
            self.scale[:, :length].to(device=device, dtype=dtype),
            self.shift[:, :length].to(device=device, dtype=dtype),
        )

    def extra_repr(self) -> str:
        return f"scale={tuple(self.scale.shape)}, shift={tuple(self.shift.shape)}"


def alibi_slopes(heads: int) -> Tensor:
    """ALiBi's slopes, float64 ``[heads]``: 2^(-8h/H), and the paper's interleaving when H is not a power of two."""
    _positive_int("heads", heads)
    power = 1 << (heads.bit_length() - 1)

    def geometric(count: int) -> Tensor:
        return 2.0 ** (-8.0 / count * torch.arange(1, count + 1, dtype=torch.float64, device="cpu"))

    return torch.cat([geometric(power), geometric(2 * power)[::2][: heads - power]])


def _positive_int(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return value


def _describe(value: object) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
