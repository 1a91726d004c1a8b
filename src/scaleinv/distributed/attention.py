"""`attention` for a sequence that several ranks share, exactly as one process computes it."""

from __future__ import annotations

import dataclasses
from typing import Literal, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from scaleinv.distributed.agreement import Choice, check_agreement, fingerprint
from scaleinv.distributed.collect import size_of
from scaleinv.distributed.exchange import all_parts, current_traffic
from scaleinv.distributed.layout import LAYOUTS, Layout, Split
from scaleinv.distributed.plan import Plan
from scaleinv.distributed.ring import Ring, RingAttention
from scaleinv.logits import LogitTransform
from scaleinv.ops import registry
from scaleinv.ops.call import DTYPES, Call, checked, query_gain_from
from scaleinv.ops.masks import FAR, Geometry, visible_counts


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logits: LogitTransform | None = ...,
    *,
    mesh: DeviceMesh,
    causal: bool = ...,
    window: int | None = ...,
    document_ids: Tensor | None = ...,
    key_mask: Tensor | None = ...,
    scale: float | None = ...,
    layout: Layout = ...,
    backend: str = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logits: LogitTransform | None = ...,
    *,
    mesh: DeviceMesh,
    causal: bool = ...,
    window: int | None = ...,
    document_ids: Tensor | None = ...,
    key_mask: Tensor | None = ...,
    scale: float | None = ...,
    layout: Layout = ...,
    backend: str = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@torch.compiler.disable  # the compiler cannot handle messages between ranks: it compiles what is before and after
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logits: LogitTransform | None = None,
    *,
    mesh: DeviceMesh,
    causal: bool = True,
    window: int | None = None,
    document_ids: Tensor | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    layout: Layout = "zigzag",
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`scaleinv.attention` over a sequence of ``n · ranks`` tokens, of which each rank of the mesh holds n.

    All ranks call it together with the same settings; if any differ, a ValueError on every rank names them. The result
    and the gradients are those of one process with the whole sequence. Gradients of a transform's own parameters (a
    learned lengthscale, LogN's factors) are this rank's share: sum them over the ranks, as DDP and FSDP do with every
    parameter.

    Args:
        query: this rank's part, ``[B, H, n, D]``. Its positions are those of `scaleinv.distributed.Split`.
        key: ``[B, KV, n, D]``.
        value: ``[B, KV, n, Dv]``.
        logits: the logit transform; None for ``ScaleInvariant()``.
        mesh: a mesh of one dimension, such as ``mesh["cp"]``.
        causal, window, scale: as in `scaleinv.attention`.
        document_ids: this rank's part, integers ``[B, n]``.
        key_mask: this rank's part, bool ``[B, n]``, True for visible keys.
        layout: "zigzag" balances causal work; "contiguous" sends least if there is a window.
        backend: "auto", or a backend that can compute one block of a longer sequence.
        return_lse: also return ``log Σ exp(L)``, ``[B, H, n]``.

    Returns:
        This rank's part of the output, ``[B, H, n, Dv]`` in value's dtype; with ``return_lse`` a pair.
    """
    ranks = size_of(mesh)
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    call = checked(
        query,
        key,
        value,
        logits,
        causal=causal,
        window=window,
        document_ids=document_ids,
        key_mask=key_mask,
        query_offset=0,
        scale=scale,
        return_lse=True,
    )
    _check_ranks(call, mesh, causal, window, layout)
    split = Split(ranks * call.geometry.keys, ranks, layout)
    ids = None if document_ids is None else document_ids.to(torch.int64)  # ranks may hold different integer types
    plan = Plan(split, causal, window, *(_whole(x, split, mesh) for x in (ids, key_mask)))
    whole = Geometry.of(split.length, split.length, 0, causal, window)
    gain, shift = whole.diagonal_tables(call.logits, call.compute_dtype, call.device)
    rank = mesh.get_local_rank()
    call = _with_gain(call, plan, whole, rank)
    engine = registry.choose(backend, call, in_blocks=True).name
    ring = Ring(plan, mesh, rank, engine, call.scale, current_traffic())
    out, lse = RingAttention.apply(call.query, call.key, call.value, gain, shift, ring)
    out = out.to(call.value.dtype)
    return (out, lse) if return_lse else out


def _check_ranks(call: Call, mesh: DeviceMesh, causal: bool, window: int | None, layout: str) -> None:
    """Raise ValueError on every rank unless all of them ask for the same thing."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    if queries != keys:
        raise ValueError(f"query and key must hold the same number of positions, got {queries} and {keys}")
    tensors = {"query": call.query, "key": call.key, "value": call.value}
    values: dict[str, float | Choice] = {
        **{f"dimension {i} of {name}": size for name, x in tensors.items() for i, size in enumerate(x.shape)},
        "scale": call.scale,
        f"logits (a checksum of class, settings and parameters, here of {type(call.logits).__name__})": fingerprint(
            call.logits
        ),
        "query's dtype": Choice(call.query.dtype, DTYPES),
        "causal": Choice(causal, (False, True)),
        "window": min(window or 0, FAR),
        "layout": Choice(layout, LAYOUTS),
        "document_ids": _given(call.document_ids),
        "key_mask": _given(call.key_mask),
        "whether gradients are needed": Choice(call.needs_grad, (False, True)),
    }
    check_agreement(mesh, "attention", values, call.device)


def _given(mask: Tensor | None) -> Choice:
    return Choice("None" if mask is None else "given", ("None", "given"))


def _whole(x: Tensor | None, split: Split, mesh: DeviceMesh) -> Tensor | None:
    """A mask of the whole sequence, ``[B, N]``, from each rank's part."""
    return None if x is None else split.join(all_parts(x, mesh), dim=1)


def _with_gain(call: Call, plan: Plan, whole: Geometry, rank: int) -> Call:
    """The call with LogN's factor in its query; it counts the keys of the whole sequence."""

    def visible() -> Tensor:
        counts = visible_counts(whole, plan.document_ids, plan.key_mask, call.device)
        return plan.split.take(counts, rank, dim=1)

    gain = query_gain_from(call, visible, context=plan.split.length)
    query = call.query if gain is None else call.query.to(gain.dtype) * gain[..., None]
    return dataclasses.replace(call, query=query, query_gain=None)
