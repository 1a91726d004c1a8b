"""The blocked algorithm as registered torch operators: opaque to the compiler, with fake kernels and an autograd rule.

`forward` is the way in. Where neither gradients nor a compiler need the registered form it calls the same function
directly: that saves some 60 µs, which a decoding step on a short cache would feel.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from scaleinv.ops import blocked, native
from scaleinv.ops.masks import Geometry
from scaleinv.ops.precision import no_autocast


def plain_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table_scale: Tensor,
    table_shift: Tensor,
    document_ids: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    offset: int,
    nearest: int,
    farthest: int,
    engine: str,
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp; see `scaleinv.ops.blocked.forward`."""
    geometry = Geometry(query.shape[2], key.shape[2], offset, nearest, farthest)
    with no_autocast(query.device):
        return _module(engine).forward(
            query, key, value, table_scale, table_shift, document_ids, key_mask, scale, geometry
        )


blocked_forward = torch.library.custom_op("scaleinv::blocked", plain_forward, mutates_args=())


@blocked_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(query.dtype, torch.float32)
    shape = query.shape[:3]
    return query.new_empty(*shape, value.shape[3], dtype=dtype), query.new_empty(shape, dtype=dtype)


@torch.library.custom_op("scaleinv::blocked_backward", mutates_args=())
def blocked_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table_scale: Tensor,
    table_shift: Tensor,
    document_ids: Tensor | None,
    key_mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    offset: int,
    nearest: int,
    farthest: int,
    engine: str,
    table_grads: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and the tables; see `scaleinv.ops.blocked.backward`."""
    geometry = Geometry(query.shape[2], key.shape[2], offset, nearest, farthest)
    with no_autocast(query.device):
        delta = torch.linalg.vecdot(grad_out, out) - grad_lse
        delta = delta.masked_fill(lse == -torch.inf, 0)  # no weights there: whatever came back means nothing
        return _module(engine).backward(
            grad_out,
            delta,
            query,
            key,
            value,
            table_scale,
            table_shift,
            document_ids,
            key_mask,
            lse,
            scale,
            geometry,
            table_grads,
        )


@blocked_backward.register_fake
def _(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table_scale: Tensor,
    table_shift: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    table_grads = rest[-1]
    shape = table_scale.shape if table_grads else (0, 0)
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        table_scale.new_empty(shape),
        table_shift.new_empty(shape),
    )


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:7], *output)
    ctx.settings = inputs[7:]


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple:
    *tensors, out, lse = ctx.saved_tensors  # read once: activation checkpointing allows no more
    table_grads = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    query, key, value, scale, shift = blocked_backward(
        grad_out, grad_lse, *tensors, out, lse, *ctx.settings, table_grads
    )
    tables = (scale, shift) if table_grads else (None, None)
    return query, key, value, *tables, None, None, None, None, None, None, None


blocked_forward.register_autograd(_backward, setup_context=_setup_context)


def forward(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """`blocked_forward`, by the shortest way."""
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or any(x.requires_grad for x in rest[:4]))
    if needs_grad or torch.compiler.is_compiling() or type(query) not in (Tensor, torch.nn.Parameter):
        return blocked_forward(query, *rest)
    with torch.no_grad():
        return plain_forward(query, *rest)


def _module(name: str) -> ModuleType:
    return native if name == "native" else blocked
