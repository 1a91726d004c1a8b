"""One process or many: started by torchrun, with DDP or FSDP2 around the model."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from scaleinv.data import document_ids
from scaleinv.distributed import Context
from scaleinv.distributed.exchange import explained
from scaleinv.distributed.layout import Layout

TIMEOUT = datetime.timedelta(minutes=10)
"""How long a rank waits for another before it gives up."""

PATIENCE = datetime.timedelta(days=1)
"""How long ranks wait while rank 0 prepares data."""


@dataclasses.dataclass(frozen=True)
class World:
    """This process among all of them."""

    rank: int
    size: int
    device: torch.device
    context: Context | None = None
    """The ranks that share each sequence with this one; None if each rank has its own sequences."""
    board: dist.Store | None = None
    """Where ranks leave notes for each other; None for one rank, or if another program brought them together."""
    turns: Iterator[int] = dataclasses.field(default_factory=itertools.count, repr=False, compare=False)

    @property
    def groups(self) -> int:
        """How many groups of ranks there are, each with its own sequences."""
        return self.size if self.context is None else self.size // self.context.ranks

    @property
    def group(self) -> int:
        """This rank's group. Neighbours share a sequence."""
        return self.rank if self.context is None else self.rank // self.context.ranks

    def runs(self, length: int) -> list[tuple[int, int]] | None:
        """The parts of a sequence that this rank holds, as (start, length); None for all of it."""
        if self.context is None:
            return None
        segments = self.context.split(length).segments(self.context.rank)
        return [(segment.start, segment.length) for segment in segments]

    def positions(self, length: int) -> Tensor:
        """The positions of a sequence that this rank holds."""
        if self.context is None:
            return torch.arange(length, device=self.device)
        return self.context.split(length).positions(self.context.rank, self.device)

    def document_ids(self, tokens: Tensor, end_of_text: int) -> Tensor:
        """`scaleinv.data.document_ids`, even if other ranks hold the beginning of the sequence."""
        if self.context is None:
            return document_ids(tokens, end_of_text)
        return self.context.cumulative_sum((tokens == end_of_text).to(torch.int32))

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
        """Whether it is true on any rank."""
        if self.size == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the loss of another rank raises `scaleinv.distributed.RankLost`, in one line."""
        return explained(f"rank {self.rank} of {self.size}")

    @contextlib.contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """Rank 0 runs the body before the others, which find what it cached on disk. They run it even if it failed.

        They wait for `PATIENCE`: to tokenise a corpus takes longer than any step.
        """
        note = f"rank 0 went first: {next(self.turns)}"
        if not self.first:
            self._follow(note)
        try:
            yield
        finally:
            if self.first:
                self._follow(note)

    def _follow(self, note: str) -> None:
        """Rank 0 leaves a note, for which the others wait."""
        if self.board is None:
            self.barrier()
        elif self.first:
            self.board.set(note, "")
        else:
            self.board.wait([note], PATIENCE)

    def on_first(self, action: Callable[..., object], *arguments: Any) -> None:
        """Only rank 0 calls the function; if that fails, all ranks raise, so that none waits for another."""
        problem: BaseException | None = None
        if self.first:
            try:
                action(*arguments)
            except BaseException as error:
                problem = error
        if self.any(problem is not None):
            raise problem or RuntimeError("rank 0 failed; its message says why")


@contextlib.contextmanager
def world(device: str = "auto", context_parallel: int = 1, layout: Layout = "zigzag") -> Iterator[World]:
    """Join the other processes if torchrun started several, and leave them at the end.

    Args:
        context_parallel: how many ranks share each sequence; it must divide their number.
        layout: how they share it, see `scaleinv.distributed.layout`.
    """
    size, rank, local = (int(os.environ.get(name, default)) for name, default in _VARIABLES)
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else torch.device(device).type
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} is not available: torch finds no CUDA device")
    chosen = (
        torch.device("cuda", local)
        if device in ("auto", "cuda") and kind == "cuda"
        else torch.device("cpu" if device == "auto" else device)
    )
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if size % context_parallel:
        raise ValueError(
            f"context_parallel must divide the number of ranks, got {context_parallel} and {size} "
            "(torchrun --nproc-per-node starts several)"
        )
    started = size > 1 and not dist.is_initialized()
    board = None
    if started:
        board, rank, size = next(rendezvous("env://"))
        board = dist.PrefixStore(f"world {next(_WORLDS)}", board)  # torchrun's notes outlive a world
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=board, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        context = None
        if context_parallel > 1:
            shape = (size // context_parallel, context_parallel)
            mesh = init_device_mesh(chosen.type, shape, mesh_dim_names=("data", "context"))
            context = Context(mesh["context"], layout)
        here = World(rank, size, chosen, context, board)
        with here.watched():
            yield here
        if board is not None:
            # With Gloo, a rank can fail in its last collective when another has left: wait until all are out of it.
            board.set(f"out of the last collective: {rank}", "")
            board.wait([f"out of the last collective: {other}" for other in range(size)])
    finally:
        if started:
            _GROUPS.append(dist.group.WORLD)
            dist.destroy_process_group()


_GROUPS: list[object] = []
"""Groups left, held to the end of the process. Otherwise the last to hold one may be DDP's reducer, which destroys it
without giving up Python's lock; if a thread of Gloo then waits for that lock to free a tensor, both wait for ever."""

_WORLDS = itertools.count()
"""Numbers the worlds of a process."""

_VARIABLES = (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0"))


def resume_command(out: str) -> str:
    """The command that continues a run on as many ranks as there are now."""
    size, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    nodes = f"--nnodes {size // local} " if size > local else ""
    torchrun = f"torchrun {nodes}--nproc-per-node {local} -m " if size > 1 else ""
    return f"{torchrun}scaleinv train --resume {out}"


def shard(model: nn.Module, here: World, blocks: nn.ModuleList) -> None:
    """FSDP2: split each block's parameters, and the rest, over the ranks, in place."""
    if here.size == 1:
        return
    for block in blocks:
        fully_shard(block)
    fully_shard(model)


def replicate(model: nn.Module, here: World, parallel: str) -> nn.Module:
    """Wrap the model in DDP if there are several ranks; FSDP has already been applied in place."""
    if here.size == 1 or parallel == "fsdp":
        return model
    return DistributedDataParallel(model, device_ids=[here.device] if here.device.type == "cuda" else None)


@contextlib.contextmanager
def accumulating(model: nn.Module, last: bool) -> Iterator[None]:
    """Exchange gradients only in the last of several backward passes."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        yield
    elif isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
    else:
        yield
