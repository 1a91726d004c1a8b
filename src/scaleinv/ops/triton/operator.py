"""The Triton kernels as registered torch operators, with fake kernels and an autograd rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scaleinv.ops.masks import Geometry
from scaleinv.ops.triton import launch
from scaleinv.ops.triton.launch import Problem


@torch.library.custom_op("scaleinv::triton", mutates_args=())
def triton_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_gain: Tensor | None,
    gain: Tensor | None,
    shift: Tensor | None,
    document_ids: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    offset: int,
    min_distance: int,
    max_distance: int,
    whole: bool,
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp; see `Problem` for the shapes.

    `whole` computes the output to float32's precision and leaves it so, for the caller to round: in the gradients of
    the tables large terms cancel, and the roundings of the output would stay.
    """
    geometry = Geometry(query.shape[2], key.shape[2], offset, min_distance, max_distance)
    problem = Problem.of(query, key, value, query_gain, gain, shift, document_ids, key_mask, scale, geometry)
    return launch.forward(problem, whole)


@triton_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.float32 if rest[-1] else value.dtype
    out = query.new_empty(*query.shape[:3], value.shape[3], dtype=dtype)
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op("scaleinv::triton_backward", mutates_args=())
def triton_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_gain: Tensor | None,
    gain: Tensor | None,
    shift: Tensor | None,
    document_ids: Tensor | None,
    key_mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    offset: int,
    min_distance: int,
    max_distance: int,
    table_grads: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, query_gain and the tables; the last three are empty where not wanted."""
    geometry = Geometry(query.shape[2], key.shape[2], offset, min_distance, max_distance)
    problem = Problem.of(query, key, value, query_gain, gain, shift, document_ids, key_mask, scale, geometry)
    return launch.backward(problem, grad_out, grad_lse, out, lse, table_grads)


@triton_backward.register_fake
def _(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_gain: Tensor | None,
    gain: Tensor | None,
    shift: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (x.new_empty(x.shape) for x in (query, key, value))
    scale, *tables = (query.new_empty(0, dtype=torch.float32) for _ in range(3))
    if query_gain is not None:
        scale = query.new_empty(query.shape[:3], dtype=torch.float32)
    if rest[-1] and gain is not None and shift is not None:
        tables = [x.new_empty(x.shape, dtype=torch.float32) for x in (gain, shift)]
    return q, k, v, scale, tables[0], tables[1]


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:8], *output)
    ctx.settings = inputs[8:12]


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple:
    *tensors, out, lse = ctx.saved_tensors  # read once: activation checkpointing allows no more
    table_grads = ctx.needs_input_grad[4] or ctx.needs_input_grad[5]
    query, key, value, query_gain, *tables = triton_backward(
        grad_out, grad_lse, *tensors, out, lse, *ctx.settings, table_grads
    )
    if ctx.needs_input_grad[3]:
        query_gain = query_gain.sum_to_size(tensors[3].shape).to(tensors[3].dtype)
    wanted = [grad if need else None for grad, need in zip(tables, ctx.needs_input_grad[4:6], strict=True)]
    c = query_gain if ctx.needs_input_grad[3] else None
    return query, key, value, c, *wanted, None, None, None, None, None, None, None


triton_forward.register_autograd(_backward, setup_context=_setup_context)
