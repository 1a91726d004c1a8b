"""`attention`: checks what it is given, chooses a backend and calls it."""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor

from scaleinv.logits import LogitTransform, ScaleInvariant
from scaleinv.ops import flex, native, operator, reference
from scaleinv.ops.masks import Geometry, visible_counts
from scaleinv.ops.precision import autocast, no_autocast

BACKENDS = ("auto", "reference", "blocked", "blocked-native", "blocked-torch", "flex")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_DEFAULT = ScaleInvariant()


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logits: LogitTransform | None = ...,
    *,
    causal: bool = ...,
    window: int | None = ...,
    document_ids: Tensor | None = ...,
    key_mask: Tensor | None = ...,
    query_offset: int | None = ...,
    scale: float | None = ...,
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
    causal: bool = ...,
    window: int | None = ...,
    document_ids: Tensor | None = ...,
    key_mask: Tensor | None = ...,
    query_offset: int | None = ...,
    scale: float | None = ...,
    backend: str = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logits: LogitTransform | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    document_ids: Tensor | None = None,
    key_mask: Tensor | None = None,
    query_offset: int | None = None,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with logits ``a_h(t) · (c_h(i) · S) + m_h(t)``, where ``S = scale · q·k`` and t is the distance.

    A drop-in for `torch.nn.functional.scaled_dot_product_attention` with ``is_causal=True``. Logits, softmax and sums
    are in float32 at least.

    Args:
        query: ``[B, H, Nq, D]``.
        key: ``[B, KV, Nk, D]``; KV divides H, and query head h reads key head ``h // (H / KV)`` (GQA).
        value: ``[B, KV, Nk, Dv]``.
        logits: the logit transform; None for ``ScaleInvariant()``.
        causal: a query sees keys at its own position and before; else in both directions, with t = \\|i - j\\|.
        window: only keys at distances t < window.
        document_ids: integers ``[B, Nk]``, one for each key (queries have those of their positions): packed documents
            do not see each other.
        key_mask: bool ``[B, Nk]``, True for visible keys; hidden ones (padding, empty cache slots) may hold anything.
        query_offset: query i stands at ``query_offset + i``, key j at j; None for ``Nk - Nq``, which is right for
            decoding and chunked prefill with a cache that holds just the past.
        scale: multiplies ``q·k``; None for ``1/√D``.
        backend: "reference", "blocked" (CPU's own), "flex" (CUDA's own) or "auto". "blocked-native" and
            "blocked-torch" name the two forms of the blocked algorithm. A backend that is asked for by name and cannot
            serve the call raises; it never gives way to another.
        return_lse: also return ``log Σ exp(L)``, ``[B, H, Nq]`` in float32 (float64 for float64).

    Returns:
        ``[B, H, Nq, Dv]``, in the inputs' dtype; with ``return_lse`` a pair. A query that sees no key gets 0 and -inf.
    """
    query, key, value = autocast(query, key, value)
    logits = _DEFAULT if logits is None else logits
    geometry = _checked(query, key, value, logits, causal, window, document_ids, key_mask, query_offset, backend)
    scale = _scale(scale, query.shape[-1])
    chosen = _choose(backend, query, key, value, logits, return_lse)

    c = _query_scale(logits, geometry, document_ids, key_mask, query)
    if chosen != "flex":  # flex compiles for a shape: it is better off with the mask
        low, high = geometry.key_range()
        if document_ids is None and (low > 0 or high < geometry.keys):
            key, value = key[:, :, low:high], value[:, :, low:high]
            key_mask = key_mask[:, low:high] if key_mask is not None else None
            geometry = geometry.sliced(low, high)
    if chosen == "flex":
        out, lse = flex.attention(query, key, value, logits, geometry, document_ids, key_mask, scale, c, return_lse)
        return (out, lse) if lse is not None else out
    if c is not None:
        query = query.to(c.dtype) * c[..., None]
    if chosen == "reference":
        with no_autocast(query.device):
            out, lse = reference.attention(query, key, value, logits, geometry, document_ids, key_mask, scale)
    else:
        dtype = torch.promote_types(query.dtype, torch.float32)
        tables = geometry.diagonal_tables(logits, dtype, query.device)
        out, lse = operator.forward(
            query,
            key,
            value,
            *tables,
            document_ids,
            key_mask,
            scale,
            geometry.offset,
            geometry.nearest,
            geometry.farthest,
            chosen.removeprefix("blocked-"),
        )
        out = out.to(value.dtype)
    return (out, lse) if return_lse else out


def which_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logits: LogitTransform | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    document_ids: Tensor | None = None,
    key_mask: Tensor | None = None,
    query_offset: int | None = None,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    detail: bool = False,
) -> str:
    """The backend that `attention` runs for the same call: "reference", "blocked" or "flex"; raises where it would.

    ``detail=True`` tells the blocked algorithm's two forms apart: "blocked-native" (the C kernel), "blocked-torch".
    """
    query, key, value = autocast(query, key, value)
    logits = _DEFAULT if logits is None else logits
    _checked(query, key, value, logits, causal, window, document_ids, key_mask, query_offset, backend)
    _scale(scale, query.shape[-1])
    chosen = _choose(backend, query, key, value, logits, return_lse)
    return chosen if detail or not chosen.startswith("blocked") else "blocked"


def _choose(backend: str, query: Tensor, key: Tensor, value: Tensor, logits: LogitTransform, return_lse: bool) -> str:
    if backend == "reference":
        return backend
    if backend in ("auto", "flex") and (backend == "flex" or query.device.type == "cuda"):
        learns = (x.requires_grad for x in (query, key, value, *logits.parameters(), *logits.buffers()))
        obstacle = flex.obstacle(query, value, torch.is_grad_enabled() and any(learns), return_lse)
        if obstacle is None:
            return "flex"
        if backend == "flex":
            raise ValueError(f"backend='flex' cannot serve this call: {obstacle}")
    if backend == "blocked-native":
        obstacle = _native_obstacle(query.device, query.dtype)
        if obstacle is not None:
            raise ValueError(f"backend='blocked-native' cannot serve this call: {obstacle}")
        return backend
    if backend == "blocked-torch":
        return backend
    return "blocked-torch" if _native_obstacle(query.device, query.dtype) else "blocked-native"


@torch.compiler.assume_constant_result
def _native_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    return native.obstacle(device, dtype)


def _query_scale(
    logits: LogitTransform,
    geometry: Geometry,
    document_ids: Tensor | None,
    key_mask: Tensor | None,
    query: Tensor,
) -> Tensor | None:
    """c_h(i), ``[B or 1, H, Nq]`` in float32 at least; None where it is 1."""
    if logits.length is None:
        return None
    if logits.length == "visible":
        count = visible_counts(geometry, document_ids, key_mask, query.device)
    else:
        context = min(geometry.keys, geometry.last + 1) if geometry.nearest == 0 else geometry.keys
        count = torch.full((1, geometry.queries), max(context, 1), device=query.device)
    return logits.query_scale(count).to(torch.promote_types(query.dtype, torch.float32))


def _scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1 / math.sqrt(head_dim)
    if torch.compiler.is_compiling() and isinstance(scale, float):  # maybe a symbol, of which nothing can be asked
        return scale
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale!r}")
    return float(scale)


def _checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logits: LogitTransform,
    causal: bool,
    window: int | None,
    document_ids: Tensor | None,
    key_mask: Tensor | None,
    query_offset: int | None,
    backend: str,
) -> Geometry:
    """The geometry of the call; ValueError or TypeError names whatever does not fit."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{name} must have shape [batch, heads, length, head dim], got {tuple(x.shape)}")
        if x.dtype not in _DTYPES:
            raise TypeError(f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}")
        if x.dtype != query.dtype:
            raise TypeError(f"{name} must have query's dtype {query.dtype}, got {x.dtype}")
        if x.shape[3] == 0:
            raise ValueError(f"{name} must have a head dimension of at least 1, got {tuple(x.shape)}")
        _same_device(name, x, query)
        if x.shape[0] != query.shape[0]:
            raise ValueError(f"{name} must have query's batch size {query.shape[0]}, got {x.shape[0]}")
    batch, heads, queries, head_dim = query.shape
    if heads == 0:
        raise ValueError(f"query must have at least one head, got shape {tuple(query.shape)}")
    keys = key.shape[2]
    if key.shape[3] != head_dim:
        raise ValueError(f"key must have query's head dimension {head_dim}, got {key.shape[3]}")
    if value.shape[1:3] != key.shape[1:3]:
        raise ValueError(
            f"value must have key's heads and length {tuple(key.shape[1:3])}, got {tuple(value.shape[1:3])}"
        )
    if key.shape[1] == 0 or heads % key.shape[1]:
        raise ValueError(f"key must have a number of heads that divides query's {heads}, got {key.shape[1]}")
    if not isinstance(logits, LogitTransform):
        raise TypeError(f"logits must be a scaleinv logit transform, got {type(logits).__name__}")
    if logits.heads is not None and logits.heads != heads:
        raise ValueError(f"logits is made for {logits.heads} heads, but query has {heads}")
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r}")
    if window is not None and (not _is_int(window) or window <= 0):
        raise ValueError(f"window must be a positive integer or None, got {window!r}")
    if query_offset is not None and not _is_int(query_offset):
        raise TypeError(f"query_offset must be an integer or None, got {query_offset!r}")
    offset = keys - queries if query_offset is None else query_offset
    if document_ids is not None:
        _check_mask("document_ids", document_ids, (batch, keys), query)
        if document_ids.is_floating_point() or document_ids.is_complex() or document_ids.dtype == torch.bool:
            raise TypeError(f"document_ids must hold integers, got {document_ids.dtype}")
        if offset < 0 or offset + queries > keys:
            raise ValueError(
                f"document_ids covers positions 0 … {keys - 1}, but the queries stand at {offset} … "
                f"{offset + queries - 1} (query_offset={offset})"
            )
    if key_mask is not None:
        _check_mask("key_mask", key_mask, (batch, keys), query)
        if key_mask.dtype != torch.bool:
            raise TypeError(f"key_mask must be bool (True for visible keys), got {key_mask.dtype}")
    return Geometry.of(queries, keys, offset, causal, window)


def _check_mask(name: str, mask: Any, shape: tuple[int, int], query: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(mask).__name__}")
    if tuple(mask.shape) != shape:
        raise ValueError(f"{name} must have shape [batch, keys] = {list(shape)}, got {list(mask.shape)}")
    _same_device(name, mask, query)


def _same_device(name: str, x: Tensor, query: Tensor) -> None:
    if x.device != query.device:
        raise ValueError(f"{name} must be on query's device {query.device}, got {x.device}")


def _is_int(value: object) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
