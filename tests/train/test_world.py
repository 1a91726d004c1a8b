"""The order of ranks, with threads for ranks."""

from __future__ import annotations

import datetime
import threading

import pytest
import torch
import torch.distributed as dist

from scaleinv.train import distributed
from scaleinv.train.distributed import World


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_wait_for_the_first_however_long_it_takes(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a step, here a tenth of a second, does not count; and they go on if it failed."""
    board, done, started = dist.HashStore(), [], threading.Event()
    board.set_timeout(datetime.timedelta(seconds=0.1))
    monkeypatch.setattr(distributed, "PATIENCE", datetime.timedelta(seconds=30))

    def other() -> None:
        here = World(1, 2, torch.device("cpu"), board=board)
        for turn in range(2):
            started.set()
            with here.first_goes_first():
                done.append((turn, 1))

    thread = threading.Thread(target=other)
    thread.start()
    first = World(0, 2, torch.device("cpu"), board=board)
    started.wait()
    for turn in range(2):
        try:
            with first.first_goes_first():
                thread.join(0.3)
                done.append((turn, 0))
                if fails:
                    raise ValueError
        except ValueError:
            assert fails
    thread.join(30)
    assert sorted(done) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(done.index((turn, 0)) < done.index((turn, 1)) for turn in range(2))
