"""Which positions of a sequence each rank holds.

``contiguous`` gives rank r the r-th of R equal runs. ``zigzag`` gives it two runs: the r-th from the front and the r-th
from the back. Under causal attention the early queries see few keys and the late ones many, so zigzag gives every rank
the same work.

    contiguous, 3 ranks     0 0 0 0 1 1 1 1 2 2 2 2
    zigzag, 3 ranks         0 0 1 1 2 2 2 2 1 1 0 0
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import torch
from torch import Tensor

Layout = Literal["contiguous", "zigzag"]
LAYOUTS: tuple[str, ...] = get_args(Layout)


@dataclasses.dataclass(frozen=True)
class Segment:
    """A run of positions: start … start + length - 1."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclasses.dataclass(frozen=True)
class Split:
    """How a sequence of ``length`` tokens is spread over ``ranks`` ranks.

    >>> Split(12, 3, "zigzag").segments(1)
    (Segment(start=2, length=2), Segment(start=8, length=2))
    """

    length: int
    ranks: int
    layout: Layout = "zigzag"

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}")
        if self.ranks < 1:
            raise ValueError(f"ranks must be positive, got {self.ranks}")
        if self.length % self.ranks:
            raise ValueError(
                f"the sequence must split evenly over the ranks: {self.length} tokens do not divide by {self.ranks}"
            )

    @property
    def part(self) -> int:
        """Tokens that each rank holds."""
        return self.length // self.ranks

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """The runs of positions that a rank holds, in its order; none is empty."""
        if self.layout == "contiguous":
            runs = [Segment(rank * self.part, self.part)]
        else:
            front = self.part // 2
            back = self.part - front  # one more where the part is odd
            runs = [Segment(rank * front, front), Segment(self.length - (rank + 1) * back, back)]
        return tuple(run for run in runs if run.length)

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """The positions that a rank holds, int64 ``[part]``."""
        runs = [torch.arange(run.start, run.stop, device=device) for run in self.segments(rank)]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64, device=device)

    def take(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """A rank's part of a whole tensor."""
        runs = [x.narrow(dim, run.start, run.length) for run in self.segments(rank)]
        return torch.cat(runs, dim) if runs else x.narrow(dim, 0, 0)

    def join(self, parts: list[Tensor], dim: int) -> Tensor:
        """The whole tensor from every rank's part."""
        shape = list(parts[0].shape)
        shape[dim] = self.length
        whole = parts[0].new_empty(shape)
        for rank, part in enumerate(parts):
            done = 0
            for run in self.segments(rank):
                whole.narrow(dim, run.start, run.length).copy_(part.narrow(dim, done, run.length))
                done += run.length
        return whole
