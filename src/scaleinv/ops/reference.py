"""The oracle: attention as the formula says, ``[Nq, Nk]`` matrices and all. Autograd does the backward."""

from __future__ import annotations

import torch
from torch import Tensor

from scaleinv.logits import LogitTransform
from scaleinv.ops.masks import Geometry, pair_mask


def attention(
    query: Tensor,  # [B, H, Nq, D], times c_h(i) where the logits have it
    key: Tensor,  # [B, KV, Nk, D]
    value: Tensor,  # [B, KV, Nk, Dv]
    logits: LogitTransform,
    geometry: Geometry,
    document_ids: Tensor | None,  # [B, Nk]
    key_mask: Tensor | None,  # [B, Nk]
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Nq, Dv]`` in value's dtype and logsumexp ``[B, H, Nq]``."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    visible = pair_mask(geometry, document_ids, key_mask, query.device)
    unseen = ~visible.any(dim=2)[..., None]  # a key that no query sees may hold anything, NaN included
    groups = query.shape[1] // key.shape[1]
    q = query.to(dtype)
    k = key.to(dtype).masked_fill(unseen, 0).repeat_interleave(groups, dim=1)
    v = value.to(dtype).masked_fill(unseen, 0).repeat_interleave(groups, dim=1)

    t = geometry.distances(query.device).abs()
    a, m = logits.tables(geometry.table_length, dtype=dtype, device=query.device)
    t = t.clamp_max(geometry.table_length - 1)  # farther ones are hidden below
    S = scale * q @ k.transpose(-1, -2)
    L = (a[:, t] * S + m[:, t]).masked_fill(~visible, -torch.inf)

    blind = ~visible.any(dim=-1)  # queries that see nothing: output 0, logsumexp -inf
    L = L.masked_fill(blind[..., None], 0)
    lse = torch.logsumexp(L, dim=-1)
    A = torch.exp(L - lse[..., None]).masked_fill(blind[..., None], 0)
    return (A @ v).to(value.dtype), lse.masked_fill(blind, -torch.inf)
