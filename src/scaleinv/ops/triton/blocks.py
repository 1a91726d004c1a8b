"""The Triton kernels as an engine: blocks of a longer sequence, and their gradients from the whole softmax.

Its tables come along the diagonals, its sums leave in float32. `scaleinv.distributed` merges such blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scaleinv.ops import operator
from scaleinv.ops.call import DiagonalCall
from scaleinv.ops.triton import obstacle as obstacle

if TYPE_CHECKING:
    from scaleinv.ops.triton.launch import Problem


def forward(call: DiagonalCall) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Nq, Dv]`` and logsumexp ``[B, H, Nq]``, both in float32."""
    from scaleinv.ops.triton import launch

    return launch.forward(_problem(call), whole=True)


def backward(call: DiagonalCall, grad_out: Tensor, lse: Tensor, delta: Tensor, table_grads: bool) -> operator.Gradients:
    """See `scaleinv.ops.operator.block_backward`."""
    from scaleinv.ops.triton import launch

    problem = _problem(call)
    grads = [torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (call.query, call.key, call.value)]
    diagonals = call.gain.new_zeros(2, call.query.shape[1], call.gain.shape[1]) if table_grads else None
    if problem.empty:
        for grad in grads:
            grad.zero_()
    else:
        lse2 = (lse * launch.LOG2E).masked_fill(lse == -torch.inf, torch.inf).contiguous()
        outer = launch.outer(problem, grad_out, lse2, delta.contiguous())
        launch.gradients(problem, outer, grads, None)
        if diagonals is not None:
            sums = launch.diagonal_sums(problem, outer)  # [H, 2, Nq + Nk - 1], from the smallest distance on
            diagonals = sums.transpose(0, 1).flip(2) * sums.new_tensor([call.scale, 1.0])[:, None, None]
    return operator.Gradients(grads[0], grads[1], grads[2], *operator.table_gradients(call, diagonals))


run = operator.engine("triton", forward, backward)


def _problem(call: DiagonalCall) -> Problem:
    """The call as the kernels take it: all of one dtype, and with tables over the distance."""
    from scaleinv.ops.triton.launch import INTERPRETED, Problem, nearby, rows
    from scaleinv.ops.triton.segments import segments

    dtype = torch.promote_types(call.query.dtype, call.key.dtype)
    if INTERPRETED and dtype == torch.bfloat16:  # the interpreter rounds it wrongly
        dtype = torch.float32
    gain, shift = (_over_distance(call, table) for table in (call.gain, call.shift))
    query, key, value = (rows(x.to(dtype)) for x in (call.query, call.key, call.value))
    return Problem(
        query,
        key,
        value,
        None,
        gain,
        shift,
        segments(call.document_ids, call.key_mask, call.geometry, call.query_ids),
        nearby(call.geometry),
        call.scale,
    )


def _over_distance(call: DiagonalCall, table: Tensor) -> Tensor:
    """A table along the diagonals as one over `Geometry.table_range`; -t holds what t does."""
    where = call.geometry
    start, stop = where.table_range()
    distance = torch.arange(start, stop, device=table.device)
    signed = torch.where((distance <= where.last) & where.visible(distance), distance, -distance)
    index = (where.last - signed).clamp(0, table.shape[1] - 1)  # only where no pair is visible does it leave the table
    return table.to(torch.float32).index_select(1, index)
