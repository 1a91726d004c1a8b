"""A model's side of context parallelism: which positions a rank holds, and attention over all of them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from scaleinv.distributed.attention import attention
from scaleinv.distributed.exchange import all_parts
from scaleinv.distributed.layout import Layout, Split
from scaleinv.logits import LogitTransform


@dataclasses.dataclass(frozen=True)
class Context:
    """The ranks that share a model's sequences. Set it as ``model.context``; see `scaleinv.model.GPT`."""

    mesh: DeviceMesh
    """A mesh of one dimension, such as ``mesh["cp"]``."""
    layout: Layout = "zigzag"

    @property
    def ranks(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    def split(self, length: int) -> Split:
        """How a sequence of ``length`` tokens is spread; ValueError if it does not split evenly."""
        return Split(length, self.ranks, self.layout)

    def positions(self, part: int, device: torch.device) -> Tensor:
        """The positions of this rank's ``part`` tokens in the whole sequence, int64 ``[part]``."""
        return self.split(part * self.ranks).positions(self.rank, device)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        logits: LogitTransform,
        document_ids: Tensor | None = None,
        key_mask: Tensor | None = None,
        backend: str = "auto",
    ) -> Tensor:
        """Causal `scaleinv.distributed.attention` over these ranks."""
        return attention(
            query,
            key,
            value,
            logits,
            mesh=self.mesh,
            layout=self.layout,
            document_ids=document_ids,
            key_mask=key_mask,
            backend=backend,
        )

    def cumulative_sum(self, x: Tensor) -> Tensor:
        """This rank's part of the running sums along the whole sequence, given its part ``x [B, n]``."""
        own = self.split(x.shape[1] * self.ranks)
        pieces = x.split([segment.length for segment in own.segments(self.rank)], dim=1)
        totals = all_parts(torch.stack([piece.sum(1) for piece in pieces], 1), self.mesh)  # [B, segments] each
        sums = []
        for segment, piece in zip(own.segments(self.rank), pieces, strict=True):
            before = sum(
                totals[rank][:, number]
                for rank in range(self.ranks)
                for number, other in enumerate(own.segments(rank))
                if other.start < segment.start
            )
            sums.append(piece.cumsum(1) + (before[:, None] if isinstance(before, Tensor) else 0))
        return torch.cat(sums, 1)
