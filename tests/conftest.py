"""Fixtures for every test."""

import functools
import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: its kernels then run on CPU, slowly

import hypothesis
import pytest
import torch

# The same examples in every run; HYPOTHESIS_PROFILE=default draws new ones.
hypothesis.settings.register_profile("seeded", derandomize=True, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "seeded"))


@pytest.fixture
def poisoned_memory(monkeypatch):
    """`torch.empty` and its kin hold NaN (or the largest integer): what is read before it is written shows up.

    `torch.utils.deterministic` can do that too, but the deterministic mode it needs makes the oracle's backward slow.
    """

    def poisoned(make):
        @functools.wraps(make)
        def wrapper(*args, **kwargs):
            x = make(*args, **kwargs)
            with torch.no_grad():
                if x.is_floating_point():
                    x.fill_(torch.nan)
                elif x.dtype != torch.bool and not x.is_complex():
                    x.fill_(torch.iinfo(x.dtype).max)
            return x

        return wrapper

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What is exhaustive is slow too: `pytest -m "not slow"` leaves both out."""
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.slow)
