"""The attention function that `scaleinv.hf` registers with transformers' attention interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scaleinv.hf.cache import Held, visible_keys
from scaleinv.hf.mask import MARKED, Regular
from scaleinv.logits import LogitTransform
from scaleinv.ops.api import attention
from scaleinv.ops.hidden import scores, weighted
from scaleinv.ops.precision import no_autocast

_UNSUPPORTED = ("position_bias", "attention_bias", "alibi")
"""Arguments with which some models change the scores: ignoring one would be silently wrong."""


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor | Held,
    value: Tensor | Held,
    attention_mask: Regular | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    use_cache: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: output ``[B, Nq, H, D]``, and no weights.

    Args:
        module: the attention layer; its config is a converted one.
        query, key, value: ``[B, H or KV, N, D]``, with the rotary embedding applied and the cache joined; or a
            `CertifiedCache` that holds the keys and values.
        attention_mask: what `scaleinv.hf.mask.attention_mask` made.
        scaling: multiplies q·k; None for 1/√D.
        softcap: the score becomes ``softcap · tanh(score / softcap)`` before the transform (Gemma 2).
        s_aux: attention sinks ``[H]``: one more logit in the softmax, outside of the transform (GPT-OSS).
    """
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} passes {name}, which scale-invariant attention does not support")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ValueError(f"{type(module).__name__} is not causal: only causal self-attention can be converted")
    if position_ids is not None and position_ids.dim() > 2:
        raise ValueError(f"position_ids must be 1-D or 2-D (no M-RoPE), got shape {tuple(position_ids.shape)}")
    transforms: tuple[LogitTransform, ...] = module.config.logit_transforms  # type: ignore[union-attr,assignment]
    logits = transforms[module.layer_idx if len(transforms) > 1 else 0]  # type: ignore[index]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)

    if isinstance(key, Held):
        if softcap is not None or s_aux is not None or dropout:
            raise ValueError(
                f"{type(module).__name__} changes its scores (a soft cap, attention sinks or dropout), which "
                "scaleinv.hf.CertifiedCache does not support: use transformers.DynamicCache"
            )
        out = key.layer.attend(query, logits, scale, visible_keys(attention_mask, key.layer.held.length))
        return out.transpose(1, 2).contiguous(), None
    assert isinstance(value, Tensor)
    if isinstance(attention_mask, Regular) and use_cache is False and position_ids is not None:
        attention_mask.split(position_ids.expand(query.shape[0], -1), key.shape[2])
    if isinstance(attention_mask, Regular) and softcap is None and dropout == 0.0:
        out = _regular(query, key, value, logits, attention_mask, scale, s_aux)
    else:
        if isinstance(attention_mask, Regular):
            distance = attention_mask.distances(query.shape[2], key.shape[2], query.device)
        elif isinstance(attention_mask, Tensor) and attention_mask.dtype == MARKED:
            distance = attention_mask.view(torch.int32)
        else:
            raise ValueError(
                "attention_mask must come from the mask function of scaleinv.hf, which knows where the keys stand, got "
                f"{_describe(attention_mask)}. Pass the model a 2-D attention_mask, or none; a ready-made 4-D mask "
                "and models that do not build masks with transformers.masking_utils are not supported"
            )
        with no_autocast(query.device):  # its products are float32, forward and backward
            out = by_distance(query, key, value, logits, distance, scale, softcap, s_aux, dropout)
    return out.transpose(1, 2).contiguous(), None


def _regular(
    query: Tensor, key: Tensor, value: Tensor, logits: LogitTransform, mask: Regular, scale: float, sinks: Tensor | None
) -> Tensor:
    out, lse = attention(
        query,
        key,
        value,
        logits,
        window=mask.window,
        document_ids=mask.document_ids,
        key_mask=mask.key_mask,
        query_offset=mask.offset,
        scale=scale,
        return_lse=True,
    )
    if sinks is None:
        return out
    kept = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])  # exp(lse) / (exp(lse) + exp(sink))
    return (out * kept[..., None]).to(out.dtype)


def by_distance(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logits: LogitTransform,
    distance: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention over a tensor of distances ``[B or 1, 1, Nq, Nk]``: any geometry, at O(Nq · Nk) memory."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    batch, heads, queries, _ = query.shape
    shared = (batch, key.shape[1], heads // key.shape[1] * queries, -1)  # the heads that share a key: one product
    visible = distance >= 0
    seen = visible.expand(batch, heads, -1, -1).reshape(*shared[:3], key.shape[2])
    S = scale * scores(query.to(dtype).reshape(shared), key.to(dtype), seen).reshape(batch, heads, queries, -1)
    if softcap is not None:
        S = softcap * torch.tanh(S / softcap)
    gain = logits.gain_of_queries(lambda: visible.sum(-1)[:, 0], context=key.shape[2])
    if gain is not None:
        S = S * gain[..., None]

    # All visible keys stand in the Nk places up to the last query: no distance reaches Nk.
    a, m = logits.tables(key.shape[2], dtype=dtype, device=query.device)
    t = distance[:, 0].clamp_min(0)
    L = a[:, t].transpose(0, 1) * S + m[:, t].transpose(0, 1)
    blind = ~visible.any(-1, keepdim=True)  # padding's own queries
    L = L.masked_fill(~visible, -torch.inf).masked_fill(blind, 0.0)
    if sinks is None:
        A = L.softmax(-1)
    else:
        column = sinks.to(dtype)[None, :, None, None].expand(*L.shape[:3], 1)
        A = torch.cat([L, column], dim=-1).softmax(-1)[..., :-1]
    A = F.dropout(A.masked_fill(blind, 0.0), dropout)
    return weighted(A.reshape(seen.shape), value.to(dtype), seen).reshape(batch, heads, queries, -1).to(value.dtype)


def _describe(mask: object) -> str:
    return f"a {mask.dtype} tensor of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
