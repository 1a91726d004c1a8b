"""The bound of certified decoding, in float64.

A key k has a copy k' of 8 bits and a number r >= ‖k - k'‖. Its logit L = a · (q·k) + m, where q carries the scale, lies
within ``width = |a| · ‖q‖ · r`` of the copy's (Cauchy-Schwarz), so that its weight w = exp(L) lies between
exp(middle - width) and exp(middle + width). Let R be the keys read, Z_R their exact weight, W the exact weight of the
others and U >= W the sum of their upper weights. The share of the softmax on keys not read is

    W / (Z_R + W)  <=  U / (Z_R + U),

because the left side grows with W. Of a page p of unread keys, with weight W_p between F_p and U_p, the values lie in a
ball around c_p of radius ρ_p. They enter as ``G_p · c_p`` with G_p = (U_p + F_p) / 2. The output

    out = (Σ_R w v + Σ_p G_p c_p) / (Z_R + Σ_p G_p)

differs from exact attention, with Z = Z_R + W, by

    exact - out = [Σ_unread w (v - c_p) + Σ_p (W_p - G_p) (c_p - out)] / Z,

    ‖exact - out‖  <=  Σ_p [U_p ρ_p + (U_p - F_p) / 2 · ‖c_p - out‖] / (Z_R + Σ_p F_p).

A computed weight that is off by at most δ of w adds Σ_R |δ| w ‖v - out‖ / Z <= 2 δ V, with V the largest norm of a
value. A computed output that is off by ρ adds ρ · (Z_R + Σ_p G_p) / Z.

Leaving the unread keys out altogether is G_p = 0, with U_p in place of (U_p - F_p) / 2: never better.
"""

from __future__ import annotations

import torch
from torch import Tensor

SLACK = 1e-12
"""Rounding of float64 products in what follows, relative: far more than they need; sums have `sum_slack`."""


def sum_slack(keys: int) -> float:
    """Rounding of float64 sums over keys, relative, in whatever order."""
    return SLACK + keys * 2.3e-16


def width(a: Tensor, query_norm: Tensor, key_norm: Tensor, residual: Tensor, m: Tensor) -> Tensor:
    """How far a logit can lie from the copy's."""
    return a.abs() * query_norm * (residual + SLACK * (key_norm + residual)) + SLACK * (m.abs() + 1e-30)


def select(middle: Tensor, width: Tensor, visible: Tensor, tolerance: float) -> Tensor:
    """The keys to read, bool: the fewest, by upper weight, for which U <= tolerance · (Z_R + U) is certain.

    What is certain of Z_R is the sum of its lower weights. Where more than half of the keys would be read, all are.
    """
    upper = torch.where(visible, middle + width, -torch.inf)
    top = upper.amax(-1, keepdim=True).clamp_min(-1e300)
    upper = torch.where(visible, (upper - top).clamp_min(-690).exp(), 0)  # never too small to count
    lower = torch.where(visible, (middle - width - top).exp(), 0)
    ordered, order = upper.sort(dim=-1)
    slack = 4 * sum_slack(upper.shape[-1])
    unread = ordered.cumsum(-1) * (1 + slack)  # U, if all keys up to this one are left out
    beyond = lower.sum(-1, keepdim=True) - lower.gather(-1, order).cumsum(-1)
    beyond = beyond - slack * lower.sum(-1, keepdim=True)
    left_out = unread <= tolerance * (beyond + unread)
    read = torch.zeros_like(left_out).scatter(-1, order, ~left_out) & visible
    many = read.sum(-1, keepdim=True) > 0.5 * visible.sum(-1, keepdim=True)
    return torch.where(many, visible, read) if tolerance > 0 else visible.expand_as(read)


def mass(unread: Tensor, total: Tensor, keys: int) -> Tensor:
    """Bound on the share of the unread keys, from their upper weights and the exact weight of those read."""
    share = unread / (total + unread).clamp_min(1e-300)
    return torch.where(unread > 0, share * (1 + 2 * sum_slack(keys)), 0)


def error(
    unread: Tensor,  # U_p [B, H, Nq, P]
    floor: Tensor,  # F_p
    radius: Tensor,  # ρ_p
    offset: Tensor,  # ‖c_p - out‖
    total: Tensor,  # Z_R [B, H, Nq]
    reach: Tensor,  # V: no value has a larger norm
    magnitude: Tensor,  # no |a S| + |m| is larger
    keys: int,
    out: Tensor,  # [B, H, Nq, Dv]
) -> Tensor:
    """Bound on ‖exact - out‖, with the rounding of the output to its dtype."""
    kind, slack = torch.finfo(out.dtype), sum_slack(keys)
    least = (total + floor.sum(-1)).clamp_min(1e-300)
    distance = (unread * radius + (unread - floor) / 2 * offset).sum(-1) / least
    spread = (total + (unread + floor).sum(-1) / 2) / least
    rounding = reach * (SLACK * magnitude + spread * (kind.eps + 2 * slack))
    most = out.double().norm(dim=-1) * (1 + SLACK) + reach
    return torch.minimum(distance * (1 + 2 * slack) + rounding, most) + out.shape[-1] * kind.tiny
