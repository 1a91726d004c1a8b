"""A fingerprint tells transforms apart by class, settings and parameters, and nothing else."""

import copy

import pytest
import torch

from scaleinv import ALiBi, DistanceTable, LogN, Plain, ScaleInvariant
from scaleinv.distributed import agreement
from scaleinv.distributed.agreement import fingerprint


def learned(tau: float) -> ScaleInvariant:
    """A lengthscale that was learned: the settings are those of the start."""
    logits = ScaleInvariant(heads=2, learnable=True)
    torch.nn.init.constant_(logits.log_tau, tau)
    return logits


def table(*last: float) -> DistanceTable:
    return DistanceTable(torch.ones(1, 2 + len(last)), torch.tensor([[0.0, 1.0, *last]]))


DIFFERENT = [
    Plain(),
    ALiBi(2),
    ALiBi(3),
    ScaleInvariant(),
    ScaleInvariant(tau=11.0),
    ScaleInvariant(tau=[10.0, 11.0]),
    ScaleInvariant(tau=[11.0, 10.0]),
    ScaleInvariant(alpha=1.2, beta=0.7),
    learned(1.0),
    learned(1.0 + 1e-6),
    LogN(2),
    LogN(2, scale=0.41),
    LogN(2, counts="context"),
    table(2.0, 3.0),
    table(3.0, 2.0),
    table(2.0, 3.0, 0.0),
]


def test_different_transforms_have_different_fingerprints() -> None:
    assert len({fingerprint(logits) for logits in DIFFERENT}) == len(DIFFERENT)


@pytest.mark.parametrize("logits", DIFFERENT, ids=str)
def test_equal_transforms_have_equal_fingerprints(logits) -> None:
    used = copy.deepcopy(logits).eval()
    used.tables(2, dtype=torch.float32, device=torch.device("cpu"))  # fills a cache
    assert fingerprint(used) == fingerprint(logits)


def test_every_element_of_a_long_table_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "CHUNK", 4)
    logits = DistanceTable(torch.ones(1, 10), torch.zeros(1, 10))
    found = {fingerprint(logits)}
    for place in range(10):
        changed = copy.deepcopy(logits)
        changed.shift[0, place] = 1e-30
        found.add(fingerprint(changed))
    assert len(found) == 11
