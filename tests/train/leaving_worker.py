"""Ranks that train a step with DDP and leave, many times: ``leaving_worker.py TIMES``."""

import faulthandler
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn

from scaleinv.train import distributed

RANKS = 4


def leave(rank: int, times: int, store: str) -> None:
    faulthandler.dump_traceback_later(150, exit=True)  # if it hangs, show where
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    board = dist.FileStore(store, RANKS)
    for time in range(times):
        here = dist.PrefixStore(str(time), board)
        distributed.rendezvous = lambda _, here=here: iter([(here, rank, RANKS)])
        step()


def step() -> None:
    """The model dies with this frame, after the world has been left."""
    with distributed.world("cpu") as here:
        model = distributed.replicate(nn.Linear(8, 8), here, "ddp")
        loss = model(torch.ones(2, 8)).sum()
        loss.backward()
        here.mean(loss.detach())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(leave, (int(sys.argv[1]), f"{folder}/store"), nprocs=RANKS)
