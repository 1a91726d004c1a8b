"""A plan names the blocks with a visible pair, and no others: checked against every pair of positions."""

import pytest
import torch

from scaleinv.distributed.layout import LAYOUTS, Split
from scaleinv.distributed.plan import Plan

N, RANKS = 24, 3
DOCUMENTS = {
    "one document": None,
    "packed": torch.tensor([[0] * 7 + [1] * 9 + [2] * 8, [5] * 2 + [3] * 20 + [4] * 2]),
    "ids that come again": torch.tensor([[0] * 4 + [1] * 16 + [0] * 4]),
}
MASKS = {"all keys": None, "front hidden": torch.arange(N)[None] >= 9}


def pairs(plan: Plan) -> torch.Tensor:
    """Who sees whom, bool ``[B, N, N]``."""
    position = torch.arange(N)
    t = position[:, None] - position
    limit = N if plan.window is None else plan.window
    seen = ((t >= 0) & (t < limit) if plan.causal else t.abs() < limit)[None]
    if plan.document_ids is not None:
        seen = seen & (plan.document_ids[:, :, None] == plan.document_ids[:, None])
    if plan.key_mask is not None:
        seen = seen & plan.key_mask[:, None]
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("mask", MASKS)
def test_a_segment_is_sent_if_and_only_if_it_is_seen(
    layout: str, causal: bool, window: int | None, documents: str, mask: str
) -> None:
    ids, visible = DOCUMENTS[documents], MASKS[mask]
    if ids is not None and visible is not None:
        visible = visible.expand(len(ids), -1)
    plan = Plan(Split(N, RANKS, layout), causal, window, ids, visible)
    seen = pairs(plan)
    for rank in range(RANKS):
        for owner in range(RANKS):
            if owner == rank:
                continue
            needed = plan.needed(rank, owner)
            for key in plan.split.segments(owner):
                assert (key in needed) == bool(seen[:, plan.split.positions(rank), key.start : key.stop].any())


def test_documents_that_lie_on_one_rank_send_nothing() -> None:
    split = Split(N, RANKS, "contiguous")
    documents = torch.arange(N)[None] // split.part
    plan = Plan(split, True, None, documents)
    assert all(not plan.needed(rank, owner) for rank in range(RANKS) for owner in range(RANKS) if owner != rank)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_work_is_the_number_of_visible_pairs(layout: str, causal: bool, window: int | None, ranks: int) -> None:
    plan = Plan(Split(N, ranks, layout), causal, window)
    seen = pairs(plan)[0]
    assert [plan.pairs(rank) for rank in range(ranks)] == [
        int(seen[plan.split.positions(rank)].sum()) for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
def test_zigzag_balances_causal_work(ranks: int) -> None:
    work = [Plan(Split(6144, ranks, "zigzag"), True, None).pairs(rank) for rank in range(ranks)]
    assert max(work) <= 1.05 * min(work)
    contiguous = [Plan(Split(6144, ranks, "contiguous"), True, None).pairs(rank) for rank in range(ranks)]
    assert max(contiguous) > 1.5 * min(contiguous)
