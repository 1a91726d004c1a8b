"""The blocked algorithm as registered torch operators: opaque to the compiler, with fake kernels and an autograd rule.

An engine computes a `DiagonalCall`: `scaleinv.ops.blocked` in torch, `scaleinv.ops.native` in C. It has two functions:

    forward(call) -> (out, lse)                                      both in ``call.compute_dtype``
    backward(call, grad_out, lse, delta, table_grads) -> Gradients

`engine` registers such a pair and returns the ``run`` of a backend. This file is the only place where a call is
flattened into the arguments of an operator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from scaleinv.ops.call import Call, DiagonalCall
from scaleinv.ops.masks import Geometry
from scaleinv.ops.precision import no_autocast


class Gradients(NamedTuple):
    """Gradients of a call's tensors, in their shapes; those of the tables are empty unless asked for.

    An engine gives them in ``call.compute_dtype``, so that parts add up without loss.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    gain: Tensor
    shift: Tensor


class Forward(Protocol):
    """An engine's forward."""

    def __call__(self, call: DiagonalCall) -> tuple[Tensor, Tensor]: ...


class Backward(Protocol):
    """An engine's backward; see `block_backward`."""

    def __call__(
        self, call: DiagonalCall, grad_out: Tensor, lse: Tensor, delta: Tensor, table_grads: bool
    ) -> Gradients: ...


@dataclasses.dataclass(frozen=True)
class Engine:
    """Both directions of the blocked algorithm."""

    forward: Forward
    backward: Backward


ENGINES: dict[str, Engine] = {}


def engine(name: str, forward: Forward, backward: Backward) -> Callable[[Call], tuple[Tensor, Tensor]]:
    """Register an engine; returns the function that runs a `Call` with it, gradients and compiler included."""
    ENGINES[name] = Engine(forward, backward)

    def run(call: Call) -> tuple[Tensor, Tensor]:
        out, lse = attend(name, call.on_diagonals())
        return out.to(call.value.dtype), lse

    return run


def attend(name: str, call: DiagonalCall) -> tuple[Tensor, Tensor]:
    """Output and logsumexp by an engine, differentiable in query, key, value and both tables.

    If neither gradients nor a compiler need the registered operator, this calls the engine directly. That saves about
    60 µs, which matters for a decoding step on a short cache.
    """
    if call.needs_grad or torch.compiler.is_compiling() or type(call.query) not in (Tensor, torch.nn.Parameter):
        return blocked_forward(name, *_Flat.of(call))
    return block_forward(name, call)


def block_forward(name: str, call: DiagonalCall) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Nq, Dv]`` and logsumexp ``[B, H, Nq]`` of one call, outside of autograd.

    Parts of the keys of a longer sequence (a key at place n of the sequence is key ``n - start`` of its part, so the
    part's ``geometry.offset`` is smaller by ``start``) merge by their logsumexp::

        lse = logaddexp(lse_1, lse_2)        out = exp(lse_1 - lse) · out_1 + exp(lse_2 - lse) · out_2

    Take care of queries that see no key in either part: there all logsumexp are -inf.
    """
    with torch.no_grad(), no_autocast(call.query.device):
        return ENGINES[name].forward(call)


def block_backward(
    name: str, call: DiagonalCall, grad_out: Tensor, lse: Tensor, delta: Tensor, table_grads: bool = False
) -> Gradients:
    """Gradients of one call from what all of its query's keys gave, outside of autograd.

    Args:
        name: the engine.
        call: one part of the keys, or all of them.
        grad_out: gradient of the merged output, ``[B, H, Nq, Dv]``.
        lse: logsumexp over all parts, ``[B, H, Nq]``: with it the weights of this part are those of the whole softmax.
        delta: `row_delta` of the merged output, ``[B, H, Nq]``.
        table_grads: also give the gradients of gain and shift.

    Gradients of the query (and of tables that parts share) add up over the parts.
    """
    with torch.no_grad(), no_autocast(call.query.device):
        return ENGINES[name].backward(call, grad_out, lse, delta, table_grads)


def row_delta(grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """``Σ grad_out · out - grad_lse`` for each query: what a row's gradients have in common, ``[B, H, Nq]``.

    All four belong to the whole softmax. It is 0 for a query that sees no key, whose gradient means nothing.
    """
    with no_autocast(out.device):
        delta = torch.linalg.vecdot(grad_out.to(out.dtype), out) - grad_lse
        return delta.masked_fill(lse == -torch.inf, 0)


def table_gradients(call: DiagonalCall, diagonals: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients of gain and shift from sums along the diagonals ``[2, H, Nq + Nk - 1]``; empty for None."""
    if diagonals is None:
        return call.gain.new_empty(0, 0), call.shift.new_empty(0, 0)
    if call.gain.shape[0] == 1:
        diagonals = diagonals.sum(dim=1, keepdim=True)
    hidden = call.shift == -torch.inf  # a hidden diagonal has no logits
    gain, shift = (x.masked_fill(hidden, 0).to(call.gain.dtype) for x in diagonals)
    return gain, shift


class _Flat(NamedTuple):
    """A call as the operators take it."""

    query: Tensor
    key: Tensor
    value: Tensor
    gain: Tensor
    shift: Tensor
    document_ids: Tensor | None
    key_mask: Tensor | None
    scale: float
    offset: int
    min_distance: int
    max_distance: int

    @classmethod
    def of(cls, call: DiagonalCall) -> _Flat:
        if call.query_ids is not None:
            raise ValueError("query_ids is for block_forward and block_backward: the operators take whole sequences")
        where = call.geometry
        return cls(
            call.query,
            call.key,
            call.value,
            call.gain,
            call.shift,
            call.document_ids,
            call.key_mask,
            call.scale,
            where.offset,
            where.min_distance,
            where.max_distance,
        )

    def call(self) -> DiagonalCall:
        geometry = Geometry(self.query.shape[2], self.key.shape[2], self.offset, self.min_distance, self.max_distance)
        return DiagonalCall(
            self.query,
            self.key,
            self.value,
            self.gain,
            self.shift,
            self.document_ids,
            self.key_mask,
            self.scale,
            geometry,
        )


@torch.library.custom_op("scaleinv::blocked", mutates_args=())
def blocked_forward(
    engine: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gain: Tensor,
    shift: Tensor,
    document_ids: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    offset: int,
    min_distance: int,
    max_distance: int,
) -> tuple[Tensor, Tensor]:
    """`block_forward` of a flattened call."""
    flat = _Flat(query, key, value, gain, shift, document_ids, key_mask, scale, offset, min_distance, max_distance)
    return block_forward(engine, flat.call())


@blocked_forward.register_fake
def _(engine: str, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(query.dtype, torch.float32)
    shape = query.shape[:3]
    return query.new_empty(*shape, value.shape[3], dtype=dtype), query.new_empty(shape, dtype=dtype)


@torch.library.custom_op("scaleinv::blocked_backward", mutates_args=())
def blocked_backward(
    engine: str,
    grad_out: Tensor,
    grad_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    table_grads: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gain: Tensor,
    shift: Tensor,
    document_ids: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    offset: int,
    min_distance: int,
    max_distance: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`block_backward` of a flattened call that is whole."""
    flat = _Flat(query, key, value, gain, shift, document_ids, key_mask, scale, offset, min_distance, max_distance)
    delta = row_delta(grad_out, grad_lse, out, lse)
    grads = block_backward(engine, flat.call(), grad_out, lse, delta, table_grads)
    return grads._replace(
        query=grads.query.to(query.dtype), key=grads.key.to(key.dtype), value=grads.value.to(value.dtype)
    )


@blocked_backward.register_fake
def _(
    engine: str,
    grad_out: Tensor,
    grad_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    table_grads: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gain: Tensor,
    shift: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tables = (x.new_empty(x.shape if table_grads else (0, 0)) for x in (gain, shift))
    return Gradients(*(x.new_empty(x.shape) for x in (query, key, value)), *tables)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.engine, *rest = inputs
    flat = _Flat(*rest)._asdict()
    tensors = {name: x for name, x in flat.items() if isinstance(x, Tensor)}
    ctx.names = list(tensors)
    ctx.settings = {name: x for name, x in flat.items() if name not in tensors}
    ctx.save_for_backward(*output, *tensors.values())


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple:
    out, lse, *tensors = ctx.saved_tensors  # read once: activation checkpointing allows no more
    flat = _Flat(**dict(zip(ctx.names, tensors, strict=True)), **ctx.settings)
    needed = dict(zip(_Flat._fields, ctx.needs_input_grad[1:], strict=True))
    table_grads = needed["gain"] or needed["shift"]
    grads = Gradients(*blocked_backward(ctx.engine, grad_out, grad_lse, out, lse, table_grads, *flat))._asdict()
    if not table_grads:
        grads["gain"] = grads["shift"] = None
    return None, *(grads.get(name) for name in _Flat._fields)


blocked_forward.register_autograd(_backward, setup_context=_setup_context)
