"""A sequence over 2, 3 and 4 processes gives what one process gives: output, log-sum-exp and every gradient."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_cases import assert_as_accurate, assert_equal_to_rounding
from attention_cases import run as run_alone
from ring_worker import RingCase, cases

from scaleinv.distributed.layout import Split
from scaleinv.distributed.plan import Plan

WORKER = Path(__file__).with_name("ring_worker.py")
RANKS = (2, 3, 4)
EVERY = [(ranks, case) for ranks in RANKS for case in cases(ranks)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict]]:
    """What each rank found, by the number of ranks."""
    found = {}
    path = os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])
    for ranks in RANKS:
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        processes = [
            subprocess.Popen(
                [sys.executable, str(WORKER), str(rank), str(ranks), str(folder)],
                env={**os.environ, "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        outputs = [process.communicate(timeout=120)[0] for process in processes]
        assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
        found[ranks] = [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]
    return found


@pytest.mark.parametrize(("ranks", "case"), EVERY, ids=[f"{ranks}-{case}" for ranks, case in EVERY])
def test_ranks_together_equal_one_process(ranks: int, case: RingCase, results: dict[int, list[dict]]) -> None:
    exact = run_alone(case.case, "reference", torch.float64, given=torch.float32)
    alone = run_alone(case.case, "reference", torch.float32)
    for rank in range(ranks):
        got = results[ranks][rank][str(case)]
        double, single = ({name: x for name, x in got[kind].items() if name != "traffic"} for kind in got)
        single, double = double, single
        assert_equal_to_rounding(double, exact)
        assert_as_accurate(single, alone, exact)
