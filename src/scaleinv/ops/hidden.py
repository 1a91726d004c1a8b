"""Products in which hidden pairs take no part: a NaN in a key must not reach a query that does not see the key.

A weight of 0 is not enough, since 0 · NaN is NaN. While all numbers are tame, plain products are right and fast. If one
is not, `product` leaves it out and marks as NaN only the results that see it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def tame(*tensors: Tensor) -> bool:
    """Whether no product of two of these can be NaN or overflow: no NaN, no infinity, no number near either."""
    return all(_tame(x) for x in tensors)


def _tame(x: Tensor) -> bool:
    if torch.compiler.is_compiling() or x.device.type == "meta" or not x.numel():
        return True  # there is nothing to check
    limit = torch.finfo(x.dtype).max ** 0.4  # with NaN, no comparison holds
    low, high = torch.aminmax(x.detach())
    return bool((low >= -limit) & (high <= limit))


def product(weights: Tensor, x: Tensor, visible: Tensor) -> Tensor:
    """weights ``[…, R, K]``, 0 where hidden, times ``[…, K, D]``: NaN only where a row sees what is not finite."""
    if tame(x):
        return weights @ x
    finite = x.isfinite()
    out = weights @ x.masked_fill(~finite, 0)
    seen = visible.to(x.dtype) @ (~finite).to(x.dtype)
    return out.masked_fill(seen > 0, torch.nan)


class _Scores(torch.autograd.Function):
    """q · kᵀ, 0 where hidden."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)).masked_fill(~visible, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        q, k, visible = ctx.saved_tensors
        grad = grad.masked_fill(~visible, 0)
        return product(grad, k, visible), product(grad.transpose(-1, -2), q, visible.transpose(-1, -2)), None


class _Weighted(torch.autograd.Function):
    """A · v, with A = 0 where hidden."""

    @staticmethod
    def forward(A: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        return product(A, v, visible)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        A, v, visible = ctx.saved_tensors
        to_weights = (grad @ v.transpose(-1, -2)).masked_fill(~visible, 0)
        return to_weights, product(A.transpose(-1, -2), grad, visible.transpose(-1, -2)), None


def scores(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """``q · kᵀ`` of visible pairs ``[B, H, Nq, Nk]``, 0 of hidden ones, differentiable."""
    result: Tensor = _Scores.apply(q, k, visible)
    return result


def weighted(A: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """``A · v`` over visible pairs ``[B, H, Nq, Dv]``, differentiable; A is 0 where hidden."""
    result: Tensor = _Weighted.apply(A, v, visible)
    return result
