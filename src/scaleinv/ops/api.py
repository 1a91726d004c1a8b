"""`attention`: checks what it is given, chooses a backend and calls it."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from scaleinv.logits import LogitTransform
from scaleinv.ops import registry
from scaleinv.ops.call import checked


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
        causal: a query sees keys at and before its own position; False sees both directions, with t = \\|i - j\\|.
        window: only keys at distances t < window.
        document_ids: integers ``[B, Nk]``, one per key (a query has that of its position): packed documents do not see
            each other.
        key_mask: bool ``[B, Nk]``, True for visible keys; hidden ones (padding, empty cache slots) may hold anything.
        query_offset: query i stands at ``query_offset + i``, key j at j; None for ``Nk - Nq``, which is right for
            decoding and chunked prefill with a cache that holds just the past.
        scale: multiplies ``q·k``; None for ``1/√D``.
        backend: "reference", "blocked" (CPU's own), "triton" and "flex" (CUDA's own) or "auto". "blocked-native" and
            "blocked-torch" name the two forms of the blocked algorithm. A backend that is asked for by name and cannot
            serve the call raises; it never gives way to another. On CUDA "auto" takes "triton" once it has agreed with
            the reference on this GPU, else "flex".
        return_lse: also return ``log Σ exp(L)``, ``[B, H, Nq]`` in float32 (float64 for float64).

    Returns:
        ``[B, H, Nq, Dv]``, in the inputs' dtype; with ``return_lse`` a pair. A query that sees no key gets 0 and -inf.
    """
    call = checked(
        query,
        key,
        value,
        logits,
        causal=causal,
        window=window,
        document_ids=document_ids,
        key_mask=key_mask,
        query_offset=query_offset,
        scale=scale,
        return_lse=return_lse,
    )
    out, lse = registry.choose(backend, call).module.run(call)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


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
    """The backend that `attention` would run for the same call; raises if `attention` would.

    ``detail=True`` distinguishes the blocked algorithm's two forms: "blocked-native" (the C kernel), "blocked-torch".
    """
    call = checked(
        query,
        key,
        value,
        logits,
        causal=causal,
        window=window,
        document_ids=document_ids,
        key_mask=key_mask,
        query_offset=query_offset,
        scale=scale,
        return_lse=return_lse,
    )
    chosen = registry.choose(backend, call)
    return chosen.name if detail or chosen.family is None else chosen.family
