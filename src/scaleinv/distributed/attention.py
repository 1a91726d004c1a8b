"""`attention` for a sequence that several ranks share, exactly as one process computes it."""

from __future__ import annotations

import dataclasses
from typing import Literal, overload
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from scaleinv.distributed.collect import all_parts, size_of
from scaleinv.distributed.exchange import check_agreement, current_traffic
from scaleinv.distributed.layout import LAYOUTS, Layout, Split
from scaleinv.distributed.plan import Plan
from scaleinv.distributed.ring import Ring, RingAttention
from scaleinv.logits import LogitTransform
from scaleinv.ops import registry
from scaleinv.ops.call import DTYPES, Call, checked, query_gain_of
from scaleinv.ops.masks import FAR, Geometry


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
    call = dataclasses.replace(call, query=_with_gain(call, plan, whole, rank))
    engine = registry.choose(backend, call, in_blocks=True).name
    ring = Ring(plan, mesh, rank, engine, call.scale, current_traffic())
    out, lse = RingAttention.apply(call.query, call.key, call.value, gain, shift, ring)
    out = out.to(call.value.dtype)
    return (out, lse) if return_lse else out


def _check_ranks(call: Call, mesh: DeviceMesh, causal: bool, window: int | None, layout: str) -> None:
    """Raise ValueError on every rank unless all of them ask for the same thing."""
    if call.query.shape[2] != call.key.shape[2]:
        sizes = f"{call.query.shape[2]} and {call.key.shape[2]}"
        raise ValueError(f"query and key must hold the same number of positions, got {sizes}")
    tensors = {"query": call.query, "key": call.key, "value": call.value}
    values: dict[str, float] = {
        f"dimension {i} of {name}": size for name, x in tensors.items() for i, size in enumerate(x.shape)
    }
    values |= {
        "scale": call.scale,
        "the class of logits (a checksum of its name)": crc32(type(call.logits).__name__.encode()),
        "query's dtype": DTYPES.index(call.query.dtype),
        "causal": int(causal),
        "window": min(window or 0, FAR),
        "layout": LAYOUTS.index(layout),
        "document_ids (1 where given)": int(call.document_ids is not None),
        "key_mask (1 where given)": int(call.key_mask is not None),
        "needs_grad": int(call.needs_grad),
    }
    check_agreement(mesh, values, call.device)


def _whole(x: Tensor | None, split: Split, mesh: DeviceMesh) -> Tensor | None:
    """A mask of the whole sequence, ``[B, N]``, from each rank's part."""
    return None if x is None else split.join(all_parts(x, mesh), dim=1)


def _with_gain(call: Call, plan: Plan, whole: Geometry, rank: int) -> Tensor:
    """The query times LogN's factor, which counts the keys of the whole sequence."""
    spread = dataclasses.replace(call, geometry=whole, document_ids=plan.document_ids, key_mask=plan.key_mask)
    gain = query_gain_of(spread)
    if gain is None:
        return call.query
    return call.query.to(gain.dtype) * plan.split.take(gain, rank, dim=2)[..., None]
