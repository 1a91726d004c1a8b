"""A sequence over 2, 3 and 4 processes gives what one process gives: output, log-sum-exp and every gradient."""

import functools
from collections.abc import Callable

import pytest
import torch
from attention_cases import assert_as_accurate, assert_equal_to_rounding
from attention_cases import run as run_alone
from processes import start_ranks
from ring_worker import DTYPES, RingCase, cases

from scaleinv.distributed.layout import Split
from scaleinv.distributed.plan import Plan

Found = Callable[[int], list[dict]]

EVERY = [
    pytest.param(ranks, case, id=f"{ranks}-{case}", marks=pytest.mark.slow)  # `test_engines` is the quick part
    for ranks in (2, 3, 4)
    for case in cases(ranks)
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank found, by the number of ranks; they run when first asked for."""

    @functools.cache
    def found(ranks: int) -> list[dict]:
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        ended = start_ranks("ring_worker.py", ranks, folder, timeout=300)
        assert all(code == 0 for code, _ in ended), "\n".join(output for _, output in ended)
        return [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]

    return found


@pytest.mark.parametrize(("ranks", "case"), EVERY)
def test_ranks_together_equal_one_process(ranks: int, case: RingCase, results: Found) -> None:
    exact = run_alone(case.case, "reference", torch.float64, given=torch.float32)
    alone = run_alone(case.case, "reference", torch.float32)
    for rank in range(ranks):
        got = results(ranks)[rank][str(case)]
        single, double = ({name: x for name, x in got[dtype].items() if name != "traffic"} for dtype in DTYPES)
        assert_equal_to_rounding(double, exact)
        assert_as_accurate(single, alone, exact)


@pytest.mark.parametrize(("ranks", "case"), EVERY)
def test_only_what_is_needed_is_sent(ranks: int, case: RingCase, results: Found) -> None:
    call = case.case
    plan = Plan(Split(call.queries, ranks, case.layout), call.causal, call.window, *call.masks().values())
    each = 4 * call.batch * (call.kv_heads or call.heads) * (call.dim + (call.value_dim or call.dim))
    for rank in range(ranks):
        others = [other for other in range(ranks) if other != rank]
        # One message for each segment that is seen: its keys and values in every pass, and their gradients once.
        out = [segment.length for other in others for segment in plan.needed(other, rank)]
        back = [segment.length for other in others for segment in plan.needed(rank, other)]
        passes = 3 if case.recompute else 2
        messages = passes * len(out) + len(back)
        sent = results(ranks)[rank][str(case)][torch.float32]["traffic"].tolist()
        assert sent == [messages, each * (passes * sum(out) + sum(back))]


@pytest.mark.slow
def test_a_window_in_contiguous_parts_reaches_the_neighbour_alone(results: Found) -> None:
    (case,) = [x for x in cases(4) if x.layout == "contiguous" and x.case.window == 5 and x.case.causal]
    messages = [results(4)[rank][str(case)][torch.float32]["traffic"][0].item() for rank in range(4)]
    assert messages == [2, 3, 3, 1]  # keys to the next rank twice, gradients to the one before once
