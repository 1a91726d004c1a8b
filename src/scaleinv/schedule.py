"""The theory: how scale and shift of a logit depend on the distance (arXiv 2505.17083, Theorem 1).

With Gaussian scores ``S ~ N(0, 1)`` and logits ``L = a_t S + m_t``, the weight ``exp(L)`` at distance t has

    E[exp L]   = exp(m_t + a_t²/2)               (expected_weight)
    E[L exp L] = (m_t + a_t²) exp(m_t + a_t²/2)  (expected_negentropy)

Asking both to fall off as ``1 / (t/tau + 1)``, with heights alpha and beta, gives every range [t, Δt) of the context
the same expected share. Solving for a_t and m_t gives `coefficients`. Natural logarithms everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from scaleinv.constants import HEIGHT, TAU


def check_parameters(tau: Any, alpha: float, beta: float) -> None:
    """Raise ValueError unless tau, alpha, beta are admissible: positive, finite, ``beta >= alpha log alpha``."""
    values = lengthscales(tau)
    if not values or not all(math.isfinite(value) and value > 0 for value in values):
        raise ValueError(f"tau must be positive and finite, got {tau}")
    for name, value in (("alpha", alpha), ("beta", beta)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be positive and finite, got {value}")
    if beta < alpha * math.log(alpha):
        raise ValueError(f"beta must be at least alpha * log(alpha) = {alpha * math.log(alpha):.6g}, got {beta}")


def lengthscales(tau: Any) -> list[float]:
    """tau as plain numbers, whether it is one, a sequence or a tensor."""
    values = tau.detach().reshape(-1).tolist() if isinstance(tau, Tensor) else tau
    try:
        return [float(value) for value in values] if isinstance(values, Iterable) else [float(values)]
    except TypeError:
        raise TypeError(f"tau must be a number, a sequence of numbers or a tensor, got {tau!r}") from None


def coefficients(
    t: Any, tau: Any = TAU, alpha: float = HEIGHT, beta: float = HEIGHT, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Scale a_t and shift m_t at distance ``t >= 0``, so that ``L = a_t * S + m_t``.

    Args:
        t: distances in tokens, a number or a tensor of any shape.
        tau: the lengthscale in tokens; several broadcast against ``t``, and gradients flow to a tensor.
        alpha: height of the expected weight at t = 0.
        beta: height of the expected negentropy at t = 0.
        dtype: of the result; float64 unless given. The formula is always evaluated in float64.

    >>> a, m = coefficients(0)
    >>> round(a.item(), 6), round(abs(m.item()), 6)
    (1.0, 0.0)
    """
    check_parameters(tau, alpha, beta)
    scale, shift = unchecked_coefficients(_distances(t), _lengthscale(tau), alpha, beta)
    return scale.to(dtype or torch.float64), shift.to(dtype or torch.float64)


def fitted_coefficients(
    t: Any, mean: Any, variance: Any, tau: Any = TAU, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Scale a_t and shift m_t for scores ``S ~ N(mean, variance)``, which leave the nearest tokens alone.

    This is Theorem 1 for the standardised score, with ``alpha = exp(variance / 2)`` and ``beta = variance *
    alpha``; the mean is added as a constant, which a softmax does not see:

        a_t = sqrt(1 + 2 log(1 + t/tau) / variance)        m_t = (1 - a_t) mean - 2 log(1 + t/tau)

    and then ``E[exp L] = exp(mean + variance / 2) / (t/tau + 1)``, ``E[L exp L] = (mean + variance) E[exp L]``. Scores
    of a large variance single out keys as they are, and need less sharpening. With mean 0 and `coefficients`, which are
    made for a variance of 1, the expected weight of a token would go as ``(t/tau + 1) ** (variance - 2)``.

    Args:
        t, tau, dtype: as for `coefficients`.
        mean, variance: of the scores; they broadcast against ``t``.

    >>> a, m = fitted_coefficients(90, mean=0.0, variance=1.0)
    >>> a == coefficients(90)[0], m == coefficients(90)[1]
    (tensor(True), tensor(True))
    """
    check_parameters(tau, HEIGHT, HEIGHT)
    check_moments(mean, variance)
    moments = (torch.as_tensor(x, dtype=torch.float64) for x in (mean, variance))
    scale, shift = unchecked_fitted_coefficients(_distances(t), _lengthscale(tau), *moments)
    return scale.to(dtype or torch.float64), shift.to(dtype or torch.float64)


def check_moments(mean: Any, variance: Any) -> None:
    """Raise ValueError unless means are finite and variances positive and finite."""
    for name, value in (("mean", mean), ("variance", variance)):
        known = torch.as_tensor(value, dtype=torch.float64)
        if not bool(known.isfinite().all()) or (name == "variance" and not bool((known > 0).all())):
            raise ValueError(f"{name} must be {'finite' if name == 'mean' else 'positive and finite'}, got {value}")


def unchecked_fitted_coefficients(
    distance: Tensor, tau: Tensor | float, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor]:
    """`fitted_coefficients` of valid float64 distances."""
    fall = 2 * torch.log1p(distance / tau)
    scale = (1 + fall / variance).sqrt()
    return scale, (1 - scale) * mean - fall


def unchecked_coefficients(distance: Tensor, tau: Tensor | float, alpha: float, beta: float) -> tuple[Tensor, Tensor]:
    """`coefficients` of valid float64 distances: it never inspects the data, so it can be traced."""
    ratio = beta / alpha
    variance = 2 * (torch.log1p(distance / tau) + (ratio - math.log(alpha)))
    return variance.clamp_min(0).sqrt(), ratio - variance


def expected_weight(t: Any, tau: Any = TAU, alpha: float = HEIGHT, beta: float = HEIGHT) -> Tensor:
    """``E[exp L_t] = alpha / (t/tau + 1)`` for Gaussian scores. It does not depend on beta."""
    check_parameters(tau, alpha, beta)
    return alpha / (_distances(t) / _lengthscale(tau) + 1)


def expected_negentropy(t: Any, tau: Any = TAU, alpha: float = HEIGHT, beta: float = HEIGHT) -> Tensor:
    """``E[L_t exp L_t] = beta / (t/tau + 1)`` for Gaussian scores. It does not depend on alpha."""
    check_parameters(tau, alpha, beta)
    return beta / (_distances(t) / _lengthscale(tau) + 1)


def total_attention_limit(tau: float = TAU, alpha: float = HEIGHT, delta: float = 10.0) -> float:
    """What the expected total weight over [t, t·delta) tends to for large t: ``alpha tau ln(delta)`` (Lemma 1)."""
    return _limit(tau, "alpha", alpha, delta)


def negentropy_limit(tau: float = TAU, beta: float = HEIGHT, delta: float = 10.0) -> float:
    """What the expected negentropy over [t, t·delta) tends to for large t: ``beta tau ln(delta)`` (Lemma 2)."""
    return _limit(tau, "beta", beta, delta)


def _limit(tau: float, name: str, height: float, delta: float) -> float:
    for label, value, low in (("tau", tau, 0.0), (name, height, 0.0), ("delta", delta, 1.0)):
        if not (math.isfinite(value) and value > low):
            raise ValueError(f"{label} must be finite and greater than {low:g}, got {value}")
    return height * tau * math.log(delta)


def _distances(t: Any) -> Tensor:
    distance = torch.as_tensor(t, dtype=torch.float64)
    if bool((distance < 0).any()):
        raise ValueError(f"t must not be negative, got a minimum of {distance.min().item()}")
    return distance


def _lengthscale(tau: Any) -> Tensor:
    return torch.as_tensor(tau, dtype=torch.float64)
