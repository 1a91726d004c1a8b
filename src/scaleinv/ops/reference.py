"""The oracle: attention as the formula says, ``[Nq, Nk]`` matrices and all. Autograd does the backward."""

from __future__ import annotations

import torch
from torch import Tensor

from scaleinv.ops.call import Call
from scaleinv.ops.hidden import scores, weighted
from scaleinv.ops.masks import distance_tables, pair_mask
from scaleinv.ops.precision import no_autocast


def obstacle(call: Call) -> None:
    """Always None: only memory limits it."""
    return None


def run(call: Call) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Nq, Dv]`` in value's dtype and logsumexp ``[B, H, Nq]``."""
    with no_autocast(call.device):
        return _attention(call.folded())


def _attention(call: Call) -> tuple[Tensor, Tensor]:
    geometry, dtype, device = call.geometry, call.compute_dtype, call.device
    visible = pair_mask(geometry, call.document_ids, call.key_mask, device)
    groups = call.query.shape[1] // call.key.shape[1]
    q = call.query.to(dtype)
    k = call.key.to(dtype).repeat_interleave(groups, dim=1)
    v = call.value.to(dtype).repeat_interleave(groups, dim=1)

    start, stop = geometry.table_range()
    a, m = distance_tables(call.logits, geometry, dtype, device)
    t = (geometry.distances(device).abs() - start).clamp(0, stop - start - 1)  # what lies outside is hidden below
    S = call.scale * scores(q, k, visible)
    L = (a[:, t] * S + m[:, t]).masked_fill(~visible, -torch.inf)

    blind = L.isneginf().all(dim=-1)  # queries that see nothing: output 0, logsumexp -inf
    lse = torch.logsumexp(L.masked_fill(blind[..., None], 0), dim=-1)
    A = torch.exp(L - lse[..., None]).masked_fill(~visible, 0)
    return weighted(A, v, visible).to(call.value.dtype), lse.masked_fill(blind, -torch.inf)
