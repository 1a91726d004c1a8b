"""FlexAttention: one fused kernel on CUDA, from torch's own compiler.

On CPU, torch offers only the forward, without the logsumexp, and only head dimensions of 32 or more come out right.
There it serves as an oracle for tests, not for training.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from scaleinv.ops.call import Call
from scaleinv.ops.masks import Geometry, distance_tables, query_documents

KEPT_MASKS = 32


def obstacle(call: Call) -> str | None:
    """Why FlexAttention cannot serve the call; None if it can."""
    device, head_dim = call.device.type, min(call.query.shape[-1], call.value.shape[-1])
    if call.query.dtype == torch.float64:
        return "FlexAttention does not take float64"
    if not call.query.numel() or not call.value.numel():
        return "FlexAttention does not take empty tensors"
    if device == "cuda":
        return "FlexAttention needs a head dimension of at least 16" if head_dim < 16 else None
    if device != "cpu":
        return f"FlexAttention does not run on {device}"
    if call.needs_grad:
        return "FlexAttention on CPU has no backward"
    if call.return_lse:
        return "FlexAttention on CPU does not give the logsumexp"
    return "FlexAttention on CPU is wrong for head dimensions below 32" if head_dim < 32 else None


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    """Output ``[B, H, Nq, Dv]`` and, if asked for, logsumexp ``[B, H, Nq]``.

    Keys that no query sees stay, because FlexAttention compiles for each shape and the mask skips them anyway. c stays
    out of the query, so that query, key and value keep one dtype.
    """
    key, value = call.key, call.value
    if call.key_mask is not None:  # 0 x NaN is NaN: an empty cache slot must not be multiplied at all
        hidden = ~call.key_mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    compiled: Any = flex_attention if torch.compiler.is_compiling() else _compiled(flex_attention, call.device.type)
    out, aux = compiled(
        call.query,
        key,
        value,
        score_mod=score_mod(call),
        block_mask=_block_mask(call.geometry, call.document_ids, call.key_mask, call.device),
        scale=call.scale,
        enable_gqa=call.query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=call.return_lse),
    )
    return out, aux.lse


def score_mod(call: Call) -> Callable[..., Tensor]:
    """``a_h(t) · (c_h(i) · score) + m_h(t)`` for FlexAttention."""
    geometry, c = call.geometry, call.query_gain
    start, stop = geometry.table_range()
    a, m = distance_tables(call.logits, geometry, torch.float32, call.device)
    # As tensors, so that a new value needs no new compilation.
    offset, least, last = torch.tensor([geometry.offset, start, stop - start - 1], device=call.device).unbind()
    many_a, many_m = a.shape[0] > 1, m.shape[0] > 1
    batched = c is not None and c.shape[0] > 1

    def modify(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        t = ((q + offset - k).abs() - least).clamp(min=0).minimum(last)
        if c is not None:
            score = score * c[b if batched else b * 0, h, q]
        return score * a[h if many_a else h * 0, t] + m[h if many_m else h * 0, t]

    return modify


def mask_mod(
    geometry: Geometry, document_ids: Tensor | None, key_mask: Tensor | None, device: torch.device
) -> Callable[..., Tensor]:
    """Who sees whom, for FlexAttention."""
    bounds = [geometry.offset, geometry.min_distance, geometry.max_distance]
    offset, smallest, largest = torch.tensor(bounds, device=device).unbind()
    own = None if document_ids is None else query_documents(document_ids, geometry.offset, geometry.queries)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        t = q + offset - k
        seen = (t >= smallest) & (t <= largest)
        if document_ids is not None and own is not None:
            seen = seen & (own[b, q] == document_ids[b, k])
        if key_mask is not None:
            seen = seen & key_mask[b, k]
        return seen

    return visible


def _block_mask(
    geometry: Geometry, document_ids: Tensor | None, key_mask: Tensor | None, device: torch.device
) -> BlockMask | None:
    tensors = [x for x in (document_ids, key_mask) if x is not None]
    if not geometry.hides and not tensors:
        return None

    def make() -> BlockMask:
        create = create_block_mask
        if device.type == "cuda" and not torch.compiler.is_compiling():
            create = _compiled(create_block_mask, device.type)  # otherwise it would hold an Nq x Nk matrix
        return create(
            mask_mod(geometry, document_ids, key_mask, device),
            B=tensors[0].shape[0] if tensors else None,
            H=None,
            Q_LEN=geometry.queries,
            KV_LEN=geometry.keys,
            device=device,
        )

    if torch.compiler.is_compiling() or any(x.is_inference() for x in tensors):  # inference tensors do not count writes
        return make()
    return _masks.get((geometry, device, document_ids is not None), tensors, make)


@functools.cache
def _compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    # With symbolic shapes, torch 2.13 writes C++ for the CPU that does not compile.
    return torch.compile(function, dynamic=False if device == "cpu" else None)


class _MaskCache:
    """The last few block masks: the layers of a model ask for the same one."""

    def __init__(self) -> None:
        self.kept: OrderedDict[Hashable, tuple[list[weakref.ref], BlockMask]] = OrderedDict()

    def get(self, key: Hashable, tensors: list[Tensor], make: Callable[[], BlockMask]) -> BlockMask:
        # A tensor counts as the same one if it is the same object and has not been written to since.
        full_key = (key, *((id(x), x._version) for x in tensors))
        found = self.kept.get(full_key)
        if found is None or any(ref() is not x for ref, x in zip(found[0], tensors, strict=True)):
            found = ([weakref.ref(x) for x in tensors], make())
            self.kept[full_key] = found
        self.kept.move_to_end(full_key)
        while len(self.kept) > KEPT_MASKS:
            self.kept.popitem(last=False)
        return found[1]


_masks = _MaskCache()
