"""Theorem 1 and its lemmas: the coefficients do what they were solved for."""

import math

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from scaleinv import schedule

positive = st.floats(1e-3, 1e3)
distances = st.integers(0, 10_000_000)


@st.composite
def parameters(draw):
    """Admissible (tau, alpha, beta), the edge beta = alpha log alpha included."""
    alpha = draw(st.floats(0.05, 20))
    least = alpha * math.log(alpha)
    extra = draw(st.just(0.0) | st.floats(0, 20))
    return draw(positive), alpha, max(least + extra, 1e-6)


@hypothesis.given(t=distances, given=parameters())
def test_theorem_1(t, given):
    tau, alpha, beta = given
    a, m = (x.item() for x in schedule.coefficients(t, tau, alpha, beta))
    weight = math.exp(m + a * a / 2)
    assert weight == pytest.approx(alpha / (t / tau + 1), rel=1e-9)
    assert (m + a * a) * weight == pytest.approx(beta / (t / tau + 1), rel=1e-9, abs=1e-9 * weight)
    assert schedule.expected_weight(t, tau, alpha, beta).item() == pytest.approx(weight, rel=1e-9)
    assert schedule.expected_negentropy(t, tau, alpha, beta).item() == pytest.approx(beta / (t / tau + 1), rel=1e-12)


@hypothesis.given(t=distances, tau=positive, mean=st.floats(-20, 20), variance=st.floats(1e-2, 1e2))
def test_theorem_1_for_scores_of_any_mean_and_variance(t, tau, mean, variance):
    """The logit is Gaussian, so its weight has a closed form; both it and its negentropy fall off as they should."""
    a, m = (x.item() for x in schedule.fitted_coefficients(t, mean, variance, tau))
    center, spread = a * mean + m, a * a * variance
    fall = math.log1p(t / tau)
    assert center + spread / 2 == pytest.approx(mean + variance / 2 - fall, rel=1e-9, abs=1e-9)
    assert center + spread == pytest.approx(mean + variance, rel=1e-9, abs=1e-9)
    # The theorem itself, for the standardised score, and the score's own mean put back.
    height = math.exp(min(variance, 50) / 2)
    if variance <= 50:
        scale, shift = (x.item() for x in schedule.coefficients(t, tau, height, variance * height))
        assert a == pytest.approx(scale / math.sqrt(variance), rel=1e-9)
        assert m == pytest.approx(shift + (1 - a) * mean, rel=1e-9, abs=1e-9)


def test_fitted_coefficients_leave_the_nearest_token_alone_and_refuse_nonsense():
    a, m = schedule.fitted_coefficients(torch.zeros(2), torch.tensor([-3.0, 5.0]), torch.tensor([8.0, 0.5]))
    assert torch.equal(a, torch.ones(2, dtype=torch.float64))
    assert torch.equal(m, torch.zeros(2, dtype=torch.float64))
    for mean, variance, name in ((0.0, 0.0, "variance"), (0.0, [1.0, -1.0], "variance"), (math.inf, 1.0, "mean")):
        with pytest.raises(ValueError, match=f"^{name} must be"):
            schedule.fitted_coefficients(1, mean, variance)
    with pytest.raises(ValueError, match="tau must be positive"):
        schedule.fitted_coefficients(1, 0.0, 1.0, 0.0)


@hypothesis.given(t=distances | st.floats(0, 1e7), tau=positive)
def test_default_form(t, tau):
    a, m = schedule.coefficients(t, tau)
    assert a.item() == pytest.approx(math.sqrt(1 + 2 * math.log1p(t / tau)), rel=1e-12)
    assert m.item() == pytest.approx(-2 * math.log1p(t / tau), rel=1e-12, abs=1e-15)


def test_the_nearest_token_is_left_alone():
    a, m = schedule.coefficients(0)
    assert a.item() == pytest.approx(1, abs=1e-15)
    assert m.item() == pytest.approx(0, abs=1e-15)
    assert schedule.TAU == 10
    assert pytest.approx(math.sqrt(math.e)) == schedule.HEIGHT


def test_gaussian_scores_have_the_expected_weight_and_negentropy():
    """By quadrature over N(0, 1), with nothing of the closed form."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    weights = weights / weights.sum()
    for t in (0, 5, 100, 10_000):
        a, m = (x.item() for x in schedule.coefficients(t, 10.0, 1.5, 2.0))
        L = a * nodes + m
        assert (weights * np.exp(L)).sum() == pytest.approx(
            schedule.expected_weight(t, 10.0, 1.5, 2.0).item(), rel=1e-8
        )
        negentropy = schedule.expected_negentropy(t, 10.0, 1.5, 2.0).item()
        assert (weights * L * np.exp(L)).sum() == pytest.approx(negentropy, rel=1e-8)


@pytest.mark.parametrize("delta", [2, 5, 10])
@pytest.mark.parametrize("tau", [0.1, 10.0])
def test_sums_over_ranges_tend_to_the_limits(delta, tau):
    gaps = []
    for t in (100, 1_000, 100_000):
        span = torch.arange(t, t * delta)
        total = schedule.expected_weight(span, tau, 2.0, 3.0).sum().item()
        negentropy = schedule.expected_negentropy(span, tau, 2.0, 3.0).sum().item()
        limit = schedule.total_attention_limit(tau, 2.0, delta)
        assert limit == pytest.approx(2.0 * tau * math.log(delta))
        assert negentropy / schedule.negentropy_limit(tau, 3.0, delta) == pytest.approx(total / limit)
        gaps.append(abs(total / limit - 1))
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-3


def test_shapes_dtypes_and_broadcasting():
    a, m = schedule.coefficients(torch.arange(5), torch.tensor([[1.0], [2.0]]), dtype=torch.float32)
    assert a.shape == m.shape == (2, 5)
    assert a.dtype == m.dtype == torch.float32
    assert schedule.coefficients(3)[0].dtype == torch.float64
    assert schedule.coefficients([0, 1, 2])[0].shape == (3,)
    assert torch.equal(schedule.coefficients(torch.arange(3), [1.0, 2.0, 3.0])[0][0], torch.tensor(1.0).double())


def test_is_evaluated_in_float64():
    near, far = schedule.coefficients(torch.tensor([10_000_000, 10_000_001], dtype=torch.int64))[1]
    assert (near - far).item() == pytest.approx(2 * math.log(10_000_011 / 10_000_010), rel=1e-6)


def test_gradients_reach_the_lengthscale():
    t = torch.tensor([0.0, 1.0, 50.0])
    tau = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda tau: schedule.coefficients(t, tau), (tau,))


@pytest.mark.parametrize("tau", [0.0, -1.0, math.nan, math.inf, torch.tensor([1.0, math.nan]), torch.empty(0)], ids=str)
@pytest.mark.parametrize("function", ["coefficients", "expected_weight", "expected_negentropy"])
def test_bad_tau(function, tau):
    with pytest.raises(ValueError, match="tau"):
        getattr(schedule, function)(1, tau)


@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_bad_heights(name, value):
    with pytest.raises(ValueError, match=name):
        schedule.coefficients(1, **{name: value})


def test_beta_below_its_bound():
    with pytest.raises(ValueError, match="beta"):
        schedule.coefficients(1, alpha=5.0, beta=5 * math.log(5) - 1e-6)
    a, _ = schedule.coefficients(0, alpha=5.0, beta=5 * math.log(5))
    assert a.item() == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("t", [-1, [3, -2]], ids=str)
@pytest.mark.parametrize("function", ["coefficients", "expected_weight", "expected_negentropy"])
def test_negative_distance(function, t):
    with pytest.raises(ValueError, match=r"\bt\b"):
        getattr(schedule, function)(t)


@pytest.mark.parametrize(
    ("name", "given"),
    [("tau", {"tau": 0.0}), ("alpha", {"alpha": -1.0}), ("delta", {"delta": 1.0}), ("delta", {"delta": math.nan})],
    ids=str,
)
def test_bad_limits(name, given):
    with pytest.raises(ValueError, match=name):
        schedule.total_attention_limit(**given)
