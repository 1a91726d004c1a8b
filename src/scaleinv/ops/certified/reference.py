"""Certified decoding in plain torch and float64: reads like the bound (docs/decoding.md); the kernel's oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scaleinv.ops.certified import bounds
from scaleinv.ops.certified.pages import PAGE, Page, unpack


def attend(
    pages: Sequence[Page],
    keys: int,
    query: Tensor,  # [B, H, Nq, D], at the last positions of 0 … keys - 1
    query_gain: Tensor | None,  # [B, H, Nq]
    a: Tensor,  # [heads or 1, keys] by distance
    m: Tensor,
    key_mask: Tensor | None,  # bool [B, keys]
    window: int,
    scale: float,
    tolerance: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output ``[B, H, Nq, Dv]``, mass, error and share read ``[B, H, Nq]``."""
    held = [pages[n] for n in range(-(-keys // PAGE))]
    heads = query.shape[1]
    groups = heads // held[0].key.shape[1]

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), dim=2)[:, :, :keys].double().repeat_interleave(groups, dim=1)

    key, value, copy = (joined(x) for x in zip(*((p.key, p.value, unpack(p)) for p in held), strict=True))
    residual = joined([page.residual for page in held])
    centre = torch.stack([page.centre for page in held], 2).double().repeat_interleave(groups, dim=1)  # [B, H, P, Dv]
    radius = torch.stack([page.radius for page in held], 2).double().repeat_interleave(groups, dim=1)  # [B, H, P]

    position = keys - query.shape[2] + torch.arange(query.shape[2], device=query.device)
    t = position[:, None] - torch.arange(keys, device=query.device)
    visible = ((t >= 0) & (t < window))[None, None]  # [1 or B, 1, Nq, keys]
    if key_mask is not None:
        visible = visible & key_mask[:, None, None]
    t = t.clamp(0, keys - 1)
    q = query.double() * scale
    if query_gain is not None:
        q = q * query_gain[..., None].double()
    a, m = a[:, t].double(), m[:, t].double()  # [heads or 1, Nq, keys]
    visible = visible & (m > -torch.inf)
    m = m.masked_fill(m == -torch.inf, 0)
    middle = a * (q @ copy.transpose(-1, -2)) + m
    norms = q.norm(dim=-1)[..., None], key.norm(dim=-1)[:, :, None]
    width = bounds.width(a, *norms, residual[:, :, None], m)
    read = bounds.select(middle, width, visible, tolerance)

    exact = torch.where(read, a * (q @ key.transpose(-1, -2)) + m, -torch.inf)
    most = exact.amax(-1, keepdim=True).clamp_min(-1e300)
    weight = (exact - most).exp()
    total = weight.sum(-1)  # [B, H, Nq], relative to exp(most)
    # Upper weights of the unread, page by page.
    outside = torch.where(visible & ~read, (middle + width - most).exp(), 0)
    page_of = torch.arange(keys, device=query.device) // PAGE
    unread = outside.new_zeros(*outside.shape[:3], len(held)).index_add(3, page_of, outside)
    widest = torch.stack([w.amax(-1) for w in torch.where(visible, width, 0).split(PAGE, dim=-1)], -1)
    floor = unread * torch.exp(-2 * widest) * (1 - 2 * bounds.sum_slack(PAGE))
    guess = (unread + floor) / 2
    out = (weight @ value + guess @ centre) / (total + guess.sum(-1)).clamp_min(1e-300)[..., None]
    largest = torch.finfo(query.dtype).max  # rounding may carry a mean of such values over it
    out = out.clamp(-largest, largest).to(query.dtype)

    mass = bounds.mass(unread.sum(-1), total, keys)
    offset = (out.double()[..., None, :] - centre[:, :, None]).norm(dim=-1)  # [B, H, Nq, P]
    reach = (centre.norm(dim=-1) + radius).amax(-1)[..., None]
    magnitude = torch.where(visible, a.abs() * norms[0] * norms[1] + m.abs(), 0).amax(-1)
    error = bounds.error(unread, floor, radius[:, :, None], offset, total, reach, magnitude, keys, out)
    count = visible.sum(-1).expand_as(mass)
    error = torch.where(count > 0, error, 0)
    share = torch.where(count > 0, read.sum(-1).double() / count.clamp_min(1), 1.0)
    return out, mass, error, share
