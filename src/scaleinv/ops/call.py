"""One call of attention as an object: what the api checks, and what a backend gets.

Shapes, here and in every backend:

    B batch    H query heads    KV key heads (KV divides H)    Nq queries    Nk keys    D head dim    Dv value dim

    query         [B, H, Nq, D]
    key           [B, KV, Nk, D]     query head h reads key head h // (H / KV)
    value         [B, KV, Nk, Dv]
    document_ids  [B, Nk]            integers; a query has the document of its position
    key_mask      [B, Nk]            bool, True for visible keys
    query_gain    [B or 1, H, Nq]    c
    gain, shift   [H or 1, Nq + Nk - 1]    a and m along the diagonals
    out, lse      [B, H, Nq, Dv], [B, H, Nq]

The logits are ``gain(t) · (query_gain(i) · S) + shift(t)`` with ``S = scale · q·k`` and t the distance.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scaleinv.logits import LogitTransform, ScaleInvariant
from scaleinv.ops.masks import Geometry, query_documents, visible_counts
from scaleinv.ops.precision import autocast

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MAX_OFFSET = 1 << 53
"""Distances beyond it are no longer exact in float64."""
_DEFAULT = ScaleInvariant()


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked call of `scaleinv.attention`. `checked` makes one from the user's arguments."""

    query: Tensor
    key: Tensor
    value: Tensor
    logits: LogitTransform
    geometry: Geometry
    scale: float
    document_ids: Tensor | None = None
    key_mask: Tensor | None = None
    query_gain: Tensor | None = None
    """c in at least float32, not yet multiplied into the query; None where it is 1."""
    return_lse: bool = False
    """Whether the caller needs the logsumexp; a backend may return it anyway."""

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.query.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of logits and sums: float32, or float64 for float64 inputs."""
        return torch.promote_types(self.query.dtype, torch.float32)

    @property
    def needs_grad(self) -> bool:
        """Whether a gradient may be asked of the result."""
        held = (self.query, self.key, self.value, *self.logits.parameters(), *self.logits.buffers())
        return torch.is_grad_enabled() and any(x.requires_grad for x in held)

    def folded(self) -> Call:
        """The same call with c multiplied into the query and without the keys that no query sees."""
        low, high = self.geometry.key_range()
        whole = self.document_ids is not None or (low == 0 and high == self.geometry.keys)
        if self.query_gain is None and whole:
            return self
        query, key, value, key_mask, geometry = self.query, self.key, self.value, self.key_mask, self.geometry
        if self.query_gain is not None:
            query = query.to(self.query_gain.dtype) * self.query_gain[..., None]
        if not whole:
            key, value = key[:, :, low:high], value[:, :, low:high]
            key_mask = None if key_mask is None else key_mask[:, low:high]
            geometry = geometry.sliced(low, high)
        return dataclasses.replace(
            self, query=query, key=key, value=value, key_mask=key_mask, geometry=geometry, query_gain=None
        )

    def on_diagonals(self) -> DiagonalCall:
        """The folded call with a and m as tables along the diagonals."""
        call = self.folded()
        gain, shift = call.geometry.diagonal_tables(call.logits, self.compute_dtype, self.device)
        return DiagonalCall(
            call.query, call.key, call.value, gain, shift, call.document_ids, call.key_mask, call.scale, call.geometry
        )


@dataclasses.dataclass(frozen=True)
class DiagonalCall:
    """A call whose logit transform has become tables: what the blocked kernels compute.

    Entry x of ``gain`` and ``shift`` holds distance ``geometry.last - x``, so query i reads entries ``Nq - 1 - i + j``.
    Hidden diagonals hold gain 0 and shift -inf. The geometry's offset may be any integer, so that a part of the keys of
    a longer sequence can be a separate call.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    gain: Tensor
    shift: Tensor
    document_ids: Tensor | None
    key_mask: Tensor | None
    scale: float
    geometry: Geometry
    query_ids: Tensor | None = None
    """Documents of the queries ``[B, Nq]`` if their positions are not among these keys; None if they are."""

    @property
    def query_documents(self) -> Tensor | None:
        """The document of each query, ``[B, Nq]``; None if there is only one document."""
        if self.query_ids is not None or self.document_ids is None:
            return self.query_ids
        return query_documents(self.document_ids, self.geometry.offset, self.geometry.queries)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of logits, sums, output and logsumexp."""
        return torch.promote_types(self.query.dtype, torch.float32)

    @property
    def needs_grad(self) -> bool:
        """Whether a gradient may be asked of the result."""
        held = (self.query, self.key, self.value, self.gain, self.shift)
        return torch.is_grad_enabled() and any(x.requires_grad for x in held)


def checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logits: LogitTransform | None,
    *,
    causal: bool,
    window: int | None,
    document_ids: Tensor | None,
    key_mask: Tensor | None,
    query_offset: int | None,
    scale: float | None,
    return_lse: bool,
) -> Call:
    """The call for the arguments of `scaleinv.attention`; ValueError or TypeError names whatever does not fit."""
    query, key, value = autocast(query, key, value)
    logits = _DEFAULT if logits is None else logits
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse must be True or False, got {return_lse!r}")
    _check_tensors(query, key, value)
    _check_logits(logits, query.shape[1])
    geometry = _geometry(query.shape[2], key.shape[2], causal, window, query_offset)
    _check_masks(document_ids, key_mask, query, geometry)
    call = Call(
        query, key, value, logits, geometry, _scale(scale, query.shape[3]), document_ids, key_mask, None, return_lse
    )
    gain = query_gain_of(call)
    return call if gain is None else dataclasses.replace(call, query_gain=gain)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{name} must have shape [batch, heads, length, head dim], got {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}")
        if x.dtype != query.dtype:
            raise TypeError(f"{name} must have query's dtype {query.dtype}, got {x.dtype}")
        if x.shape[3] == 0:
            raise ValueError(f"{name} must have a head dimension of at least 1, got {tuple(x.shape)}")
        _same_device(name, x, query)
        if x.shape[0] != query.shape[0]:
            raise ValueError(f"{name} must have query's batch size {query.shape[0]}, got {x.shape[0]}")
    heads, head_dim = query.shape[1], query.shape[3]
    if heads == 0:
        raise ValueError(f"query must have at least one head, got shape {tuple(query.shape)}")
    if key.shape[3] != head_dim:
        raise ValueError(f"key must have query's head dimension {head_dim}, got {key.shape[3]}")
    if value.shape[1:3] != key.shape[1:3]:
        raise ValueError(
            f"value must have key's heads and length {tuple(key.shape[1:3])}, got {tuple(value.shape[1:3])}"
        )
    if key.shape[1] == 0 or heads % key.shape[1]:
        raise ValueError(f"key must have a number of heads that divides query's {heads}, got {key.shape[1]}")


def _check_logits(logits: LogitTransform, heads: int) -> None:
    if not isinstance(logits, LogitTransform):
        raise TypeError(f"logits must be a scaleinv logit transform, got {type(logits).__name__}")
    if logits.heads is not None and logits.heads != heads:
        raise ValueError(f"logits is made for {logits.heads} heads, but query has {heads}")


def _geometry(queries: int, keys: int, causal: bool, window: int | None, query_offset: int | None) -> Geometry:
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r}")
    if window is not None and (not _is_int(window) or window <= 0):
        raise ValueError(f"window must be a positive integer or None, got {window!r}")
    if query_offset is not None and not _is_int(query_offset):
        raise TypeError(f"query_offset must be an integer or None, got {query_offset!r}")
    if query_offset is not None and not -MAX_OFFSET <= query_offset <= MAX_OFFSET:
        raise ValueError(f"query_offset must lie within ±2^53, got {query_offset}")
    return Geometry.of(queries, keys, keys - queries if query_offset is None else query_offset, causal, window)


def _check_masks(document_ids: Tensor | None, key_mask: Tensor | None, query: Tensor, geometry: Geometry) -> None:
    shape, offset = (query.shape[0], geometry.keys), geometry.offset
    if document_ids is not None:
        _check_mask("document_ids", document_ids, shape, query)
        if document_ids.is_floating_point() or document_ids.is_complex() or document_ids.dtype == torch.bool:
            raise TypeError(f"document_ids must hold integers, got {document_ids.dtype}")
        if offset < 0 or offset + geometry.queries > geometry.keys:
            raise ValueError(
                f"document_ids covers positions 0 … {geometry.keys - 1}, but the queries stand at {offset} … "
                f"{offset + geometry.queries - 1} (query_offset={offset})"
            )
    if key_mask is not None:
        _check_mask("key_mask", key_mask, shape, query)
        if key_mask.dtype != torch.bool:
            raise TypeError(f"key_mask must be bool (True for visible keys), got {key_mask.dtype}")


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


def _scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1 / math.sqrt(head_dim)
    if torch.compiler.is_compiling() and isinstance(scale, float):  # it may be a symbol without a value
        return scale
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale!r}")
    return float(scale)


def query_gain_of(call: Call) -> Tensor | None:
    """c_h(i) in the dtype of the logits, ``[B or 1, H, Nq]``; None where it is 1."""
    geometry = call.geometry
    return query_gain_from(
        call,
        lambda: visible_counts(geometry, call.document_ids, call.key_mask, call.device),
        context=min(geometry.keys, geometry.last + 1) if geometry.min_distance == 0 else geometry.keys,
    )


def query_gain_from(call: Call, visible: Callable[[], Tensor], context: int) -> Tensor | None:
    """`query_gain_of` from the counts of keys, as `LogitTransform.gain_of_queries` takes them."""
    gain = call.logits.gain_of_queries(visible, context)
    if gain is None:
        return None
    batch, heads, queries = call.query.shape[:3]
    expected = (batch, heads, queries)
    fits = gain.dim() == 3 and gain.shape[2] == queries
    for size, whole in zip(gain.shape[:2], expected, strict=False):
        fits = fits and (size == 1 or size == whole)  # `in` fails with the compiler's symbols
    if not fits:
        raise ValueError(
            f"logits ({type(call.logits).__name__}) must give a query_gain of shape [batch or 1, heads or 1, "
            f"queries] = {list(expected)}, got {list(gain.shape)}"
        )
    return gain.to(call.compute_dtype).expand(-1, heads, -1)
