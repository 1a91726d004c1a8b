"""Paired differences: what both methods share cancels, and the standard error is that of simulated repetitions."""

import math
import random
import statistics

import pytest

from scaleinv.analysis.paired import Difference, SeedLoss, paired_differences, standard_error, student


def test_what_both_share_cancels() -> None:
    generator = random.Random(0)
    luck = [generator.gauss(0, 1) for _ in range(4)]
    ours = {seed: SeedLoss(1.5 + luck[seed]) for seed in range(4)}
    base = {seed: SeedLoss(1.0 + luck[seed]) for seed in range(4)}
    found = paired_differences({"a": {"1x": ours}, "b": {"1x": base}}, "b")
    assert list(found) == ["a"]
    assert found["a"]["1x"].value == pytest.approx(0.5)
    assert found["a"]["1x"].error == pytest.approx(0, abs=1e-12)
    assert not found["a"]["1x"].within_noise


def test_only_common_seeds_and_finite_losses_count() -> None:
    ours = {0: SeedLoss(1.0), 1: SeedLoss(2.0), 2: SeedLoss(math.nan)}
    base = {1: SeedLoss(1.5), 2: SeedLoss(1.0), 3: SeedLoss(1.0)}
    found = paired_differences({"a": {"1x": ours, "4x": ours}, "b": {"1x": base}}, "b")["a"]
    assert list(found) == ["1x"]
    assert found["1x"] == Difference(0.5, None, 1, None, found["1x"].limit)
    assert not found["1x"].within_noise  # a single pair says nothing about noise
    assert paired_differences({"a": {"1x": ours}}, "b") == {}


def test_windows_are_paired_where_all_are_known() -> None:
    ours = {0: SeedLoss(2.0, (1.0, 2.0, 3.0)), 1: SeedLoss(2.0, (1.5, 2.0, 2.5))}
    base = {0: SeedLoss(1.0, (0.0, 1.0, 2.0)), 1: SeedLoss(1.0, (0.5, 1.0, 1.5))}
    found = paired_differences({"a": {"1x": ours}, "b": {"1x": base}}, "b")["a"]["1x"]
    assert (found.seeds, found.windows, found.value) == (2, 3, 1.0)
    assert found.error == pytest.approx(0, abs=1e-12)
    partly = {**base, 1: SeedLoss(1.0)}
    assert paired_differences({"a": {"1x": ours}, "b": {"1x": partly}}, "b")["a"]["1x"].windows is None


@pytest.mark.parametrize(("seeds", "windows"), [(3, 1), (1, 40), (3, 40), (8, 5)])
def test_the_standard_error_is_that_of_repetitions(seeds: int, windows: int) -> None:
    """Tables of seed effects, window effects and a rest: the mean of squared errors is the variance of the mean."""
    generator = random.Random(1)
    means, squares = [], []
    for _ in range(4000):
        seed = [generator.gauss(0, 0.5 if seeds > 1 else 0) for _ in range(seeds)]
        window = [generator.gauss(0, 1 if windows > 1 else 0) for _ in range(windows)]
        table = [[s + w + generator.gauss(0, 0.3) for w in window] for s in seed]
        means.append(statistics.fmean(x for row in table for x in row))
        error = standard_error(table)
        assert error is not None
        squares.append(error**2)
    # The estimate never falls below what seeds or windows alone show, so it errs a little to the safe side.
    assert 0.93 < statistics.fmean(squares) / statistics.pvariance(means, 0.0) < 1.15


def test_a_single_number_has_no_error() -> None:
    assert standard_error([[1.0]]) is None


def test_student() -> None:
    assert student(2) == 4.303
    # Abramowitz & Stegun, table 26.10.
    for freedom, value in ((10, 2.228), (20, 2.086), (120, 1.980)):
        assert value <= student(freedom) < 1.01 * value
    assert sorted(map(student, range(1, 200)), reverse=True) == list(map(student, range(1, 200)))
