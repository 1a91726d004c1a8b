"""Least-squares fits of growth."""

import math

import numpy as np
import pytest

from scaleinv.analysis.growth import fit, log_likelihood_ratio

STARTS = [2**k for k in range(4, 18)]


@pytest.mark.parametrize(("against", "axis"), [("log t", np.log), ("√log t", lambda t: np.sqrt(np.log(t)))])
def test_equals_polyfit(against, axis) -> None:
    values = [math.log(t) ** 0.8 + 0.01 * math.sin(t) for t in STARTS]
    found = fit(STARTS, values, against)
    (slope, intercept), covariance = np.polyfit(axis(STARTS), values, 1, cov=True)
    assert (found.slope, found.intercept) == pytest.approx((slope, intercept))
    assert found.error == pytest.approx(math.sqrt(covariance[0, 0]))
    assert found.r2 == pytest.approx(np.corrcoef(axis(STARTS), values)[0, 1] ** 2)
    assert found(100) == pytest.approx(intercept + slope * axis(100))


def test_constant() -> None:
    found = fit(STARTS, [3.0] * 7 + [5.0] * 7, "constant", [0.1] * 14)
    assert (found.slope, found.intercept, found.r2) == (0.0, 4.0, 0.0)
    assert found.error == pytest.approx(0.1 / math.sqrt(14))


def test_the_error_is_that_of_repeated_experiments() -> None:
    rng = np.random.default_rng(0)
    errors = list(np.linspace(0.01, 0.2, len(STARTS)))
    slopes = [fit(STARTS, list(rng.normal(0, errors)), "log t").slope for _ in range(2000)]
    assert fit(STARTS, [0.0] * len(STARTS), "log t", errors).error == pytest.approx(np.std(slopes), rel=0.05)


def test_likelihood_prefers_the_true_axis() -> None:
    values = [math.sqrt(math.log(t)) for t in STARTS]
    root, straight = fit(STARTS, values, "√log t"), fit(STARTS, values, "log t")
    assert log_likelihood_ratio(root, straight, STARTS, values, [0.01] * 14) > 5
    assert log_likelihood_ratio(straight, root, STARTS, values, [0.01] * 14) < -5


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="against"):
        fit(STARTS, STARTS, "t²")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="values"):
        fit(STARTS, [1.0, 2.0], "log t")
