"""One process or many: started by torchrun, with DDP or FSDP2 around the model."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel


@dataclasses.dataclass(frozen=True)
class World:
    """This process among all of them."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all ranks."""
        return self.sum(value) / self.size

    def sum(self, value: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def any(self, flag: bool) -> bool:
        """Does any rank say so?"""
        if self.size == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    @contextlib.contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """Rank 0 runs the body before the others: what it caches on disk, they find. If it fails, they still go."""
        if not self.first:
            self.barrier()
        try:
            yield
        finally:
            if self.first:
                self.barrier()

    def on_first(self, action: Callable[..., None], *arguments: Any) -> None:
        """Rank 0 does it; if that fails, all ranks raise, so that none waits for another."""
        problem: BaseException | None = None
        if self.first:
            try:
                action(*arguments)
            except BaseException as error:
                problem = error
        if self.any(problem is not None):
            raise problem or RuntimeError("rank 0 failed; its message says why")


@contextlib.contextmanager
def world(device: str = "auto") -> Iterator[World]:
    """Join the other processes where torchrun started several, and leave them at the end."""
    size, rank, local = (int(os.environ.get(name, default)) for name, default in _VARIABLES)
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else torch.device(device).type
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} was asked for, but torch finds no CUDA device")
    chosen = (
        torch.device("cuda", local)
        if device in ("auto", "cuda") and kind == "cuda"
        else torch.device("cpu" if device == "auto" else device)
    )
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    started = size > 1 and not dist.is_initialized()
    if started:
        board, rank, size = next(rendezvous("env://"))
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=board, rank=rank, world_size=size)
    try:
        yield World(rank, size, chosen)
        if started:
            # Gloo can fail a rank in its last collective when another has hung up: wait for all to be out of it.
            board.set(f"out of the last collective: {rank}", "")
            board.wait([f"out of the last collective: {other}" for other in range(size)])
    finally:
        if started:
            dist.destroy_process_group()


_VARIABLES = (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0"))


def shard(model: nn.Module, here: World, blocks: nn.ModuleList) -> None:
    """FSDP2: each block's parameters, and the rest, split over the ranks, in place."""
    if here.size == 1:
        return
    for block in blocks:
        fully_shard(block)
    fully_shard(model)


def replicate(model: nn.Module, here: World, parallel: str) -> nn.Module:
    """DDP around the model where there are several ranks; FSDP has been applied in place."""
    if here.size == 1 or parallel == "fsdp":
        return model
    return DistributedDataParallel(model, device_ids=[here.device] if here.device.type == "cuda" else None)


@contextlib.contextmanager
def accumulating(model: nn.Module, last: bool) -> Iterator[None]:
    """Gradients are exchanged only in the last of several backward passes."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        yield
    elif isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
    else:
        yield
