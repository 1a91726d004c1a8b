"""Cross entropy of a linear layer's logits, without all of them at once.

The logits are made in chunks of rows, and made again in the backward pass: exp(logits − logsumexp) is then the
gradient but for the target's 1, so no softmax is computed twice. Where the vocabulary is large and the model small,
that is most of a training step on a CPU. (`F.linear_cross_entropy`, which newer torch has, leaves a compiled
graph where it goes in chunks.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

CHUNK = {"cpu": 1 << 23}
"""Logits at once, by device: a CPU is fastest while they fit in its cache."""
CHUNK_ELSEWHERE = 1 << 25


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The loss of each row in nats, at least float32 ``[N]``, for x ``[N, D]``, weight ``[V, D]`` and targets ``[N]``.

    The matrix products run in the dtype that autocast chooses, everything else in at least float32.
    """
    rows = max(1, CHUNK.get(x.device.type, CHUNK_ELSEWHERE) // len(weight))
    if len(x) <= rows:
        return F.cross_entropy(_widened(F.linear(x, weight)), targets, reduction="none")
    return _Chunked.apply(x, weight, targets, rows)


def _widened(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        normalizers, chosen = [], []
        for some, wanted in zip(x.split(rows), targets.split(rows), strict=True):
            product = F.linear(some, weight)
            logits = _widened(product)
            normalizers.append(logits.logsumexp(-1))
            chosen.append(logits.gather(1, wanted[:, None])[:, 0])
        logsumexp = torch.cat(normalizers)
        ctx.save_for_backward(x, weight, targets, logsumexp)
        ctx.rows, ctx.dtype = rows, product.dtype
        return logsumexp - torch.cat(chosen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, targets, logsumexp = ctx.saved_tensors
        used = weight.to(ctx.dtype)
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        for start in range(0, len(x), ctx.rows):
            some = slice(start, start + ctx.rows)
            inputs = x[some].to(ctx.dtype)
            share = _widened(F.linear(inputs, used)).sub_(logsumexp[some, None]).exp_()
            share.scatter_add_(1, targets[some, None], share.new_full((len(inputs), 1), -1))
            share = share.mul_(grad[some, None]).to(ctx.dtype)
            grad_x[some] = share @ used
            if ctx.dtype == weight.dtype:
                grad_weight.addmm_(share.T, inputs)
            else:
                grad_weight += share.T @ inputs
        return grad_x, grad_weight, None, None
