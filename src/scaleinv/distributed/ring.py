"""One sequence over several ranks: keys and values travel in a ring, queries stay.

Each rank computes the blocks of its own queries and merges them by their log-sum-exps, in float32. In the backward the
keys travel again, and their gradients return to their owners in float32. While a block is computed, the next one is on
its way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from scaleinv.distributed.exchange import Exchange, Traffic
from scaleinv.distributed.layout import Segment
from scaleinv.distributed.plan import Plan
from scaleinv.ops.call import DiagonalCall
from scaleinv.ops.operator import block_backward, block_forward, row_delta

PASSING, RETURNING = 0, 1
"""Tags of messages: keys and values on their way out, gradients on their way back to their owner."""

Pair = tuple[Tensor, Tensor]
"""Keys and values of a segment, or their gradients."""


@dataclasses.dataclass(frozen=True)
class Ring:
    """What a rank must know to compute its part."""

    plan: Plan
    mesh: DeviceMesh
    rank: int
    engine: str
    scale: float
    traffic: Traffic | None

    @property
    def size(self) -> int:
        return self.plan.split.ranks

    def own(self) -> Iterator[tuple[Segment, slice]]:
        """This rank's segments, and where they lie in its tensors."""
        done = 0
        for segment in self.plan.split.segments(self.rank):
            yield segment, slice(done, done + segment.length)
            done += segment.length

    def local(self, key: Tensor, value: Tensor) -> dict[Segment, Pair]:
        """This rank's keys and values by segment."""
        return {segment: (key[:, :, rows], value[:, :, rows]) for segment, rows in self.own()}

    def pass_on(self, step: int, held: dict[Segment, Pair], key: Tensor, value: Tensor) -> Exchange:
        """Start step ``step`` of the ring: send that many ranks ahead, receive from as many behind."""
        exchange = Exchange(self.mesh, 2 * step + PASSING, self.traffic)
        to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
        _send(exchange, to, [held[segment] for segment in self.plan.needed(to, self.rank)])
        _receive(exchange, source, key, value, self.plan.needed(self.rank, source), key.dtype)
        return exchange.start()

    def return_home(self, step: int, grads: dict[Segment, Pair], key: Tensor, value: Tensor) -> Exchange:
        """Send the gradients of a visiting block to its owner, and receive those of this rank's own block."""
        exchange = Exchange(self.mesh, 2 * step + RETURNING, self.traffic)
        owner, visited = (self.rank - step) % self.size, (self.rank + step) % self.size
        _send(exchange, owner, list(grads.values()))
        _receive(exchange, visited, key, value, self.plan.needed(visited, self.rank), compute_dtype(key))
        return exchange.start()

    def visits(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, dict[Segment, Pair]]]:
        """Each step's keys and values by segment, this rank's own first, while the next ones are in flight."""
        held = self.local(key, value)
        coming = self.pass_on(1, held, key, value) if self.size > 1 else None
        yield 0, held
        for step in range(1, self.size):
            assert coming is not None
            message = coming.wait()
            coming = self.pass_on(step + 1, held, key, value) if step + 1 < self.size else None
            segments = self.plan.needed(self.rank, (self.rank - step) % self.size)
            yield step, _unpacked(message, segments, key, value)

    def calls(
        self, query: Tensor, visiting: dict[Segment, Pair], gain: Tensor, shift: Tensor
    ) -> Iterator[tuple[Segment, slice, slice, DiagonalCall]]:
        """The blocks of this rank's queries and visiting keys: key segment, rows, diagonals and the call."""
        for own, rows in self.own():
            for segment, (key, value) in visiting.items():
                if not self.plan.sees(own, segment):
                    continue
                geometry = self.plan.geometry(own, segment)
                first = self.plan.split.length - 1 - geometry.last  # where the block's diagonals begin in the tables
                diagonals = slice(first, first + geometry.queries + geometry.keys - 1)
                yield (
                    segment,
                    rows,
                    diagonals,
                    DiagonalCall(
                        query[:, :, rows],
                        key,
                        value,
                        gain[:, diagonals].contiguous(),
                        shift[:, diagonals].contiguous(),
                        _columns(self.plan.document_ids, segment),
                        _columns(self.plan.key_mask, segment),
                        self.scale,
                        geometry,
                        _columns(self.plan.document_ids, own),
                    ),
                )


class RingAttention(torch.autograd.Function):
    """Output and log-sum-exp of this rank's queries, both in float32 at least.

    Args:
        query: ``[B, H, n, D]``, with LogN's factor already in it.
        key, value: ``[B, KV, n, D]`` and ``[B, KV, n, Dv]``.
        gain, shift: a and m along all diagonals of the whole sequence, ``[H or 1, 2 N - 1]``.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, gain: Tensor, shift: Tensor, ring: Ring
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(query)
        out = query.new_zeros(*query.shape[:3], value.shape[3], dtype=dtype)
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=dtype)
        for _, visiting in ring.visits(key, value):
            for _, rows, _, call in ring.calls(query, visiting, gain, shift):
                _merge(out[:, :, rows], lse[:, :, rows], *block_forward(ring.engine, call))
        ctx.save_for_backward(query, key, value, gain, shift, out, lse)
        ctx.ring = ring
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, gain, shift, out, lse = ctx.saved_tensors  # read once: checkpointing allows no more
        ring: Ring = ctx.ring
        table_grads = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        delta = row_delta(grad_out, grad_lse, out, lse)
        grad_query, grad_key, grad_value = (x.new_zeros(x.shape, dtype=compute_dtype(x)) for x in (query, key, value))
        grad_gain, grad_shift = (torch.zeros_like(x) if table_grads else None for x in (gain, shift))
        home = ring.local(grad_key, grad_value)  # views: arriving gradients are added in place
        returning: tuple[int, Exchange] | None = None
        for step, visiting in ring.visits(key, value):
            grads = home if step == 0 else {s: (_zeros(k), _zeros(v)) for s, (k, v) in visiting.items()}
            for segment, rows, diagonals, call in ring.calls(query, visiting, gain, shift):
                found = block_backward(
                    ring.engine, call, grad_out[:, :, rows], lse[:, :, rows], delta[:, :, rows], table_grads
                )
                grad_query[:, :, rows] += found.query
                grads[segment][0].add_(found.key)
                grads[segment][1].add_(found.value)
                if grad_gain is not None and grad_shift is not None:
                    grad_gain[:, diagonals] += found.gain
                    grad_shift[:, diagonals] += found.shift
            if returning is not None:
                _add_home(ring, *returning, home, grad_key, grad_value)
            returning = (step, ring.return_home(step, grads, grad_key, grad_value)) if step else None
        if returning is not None:
            _add_home(ring, *returning, home, grad_key, grad_value)
        return (
            grad_query.to(query.dtype),
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            grad_gain,
            grad_shift,
            None,
        )


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of sums: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def _merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge a block of keys in place. A query that has seen no key yet stays as it is: 0 and -inf."""
    total = torch.logaddexp(lse, block_lse)
    finite = total.masked_fill(total == -torch.inf, 0)
    out.mul_((lse - finite).exp()[..., None]).add_(block_out * (block_lse - finite).exp()[..., None])
    lse.copy_(total)


def _add_home(ring: Ring, step: int, exchange: Exchange, home: dict[Segment, Pair], key: Tensor, value: Tensor) -> None:
    """Wait for the gradients of this rank's keys from the rank that they visited, and add them."""
    visited = (ring.rank + step) % ring.size
    for segment, pair in _unpacked(exchange.wait(), ring.plan.needed(visited, ring.rank), key, value).items():
        for total, part in zip(home[segment], pair, strict=True):
            total += part


def _send(exchange: Exchange, to: int, pairs: list[Pair]) -> None:
    if pairs:
        exchange.send(torch.cat([x.reshape(-1) for pair in pairs for x in pair]), to)


def _receive(
    exchange: Exchange, source: int, key: Tensor, value: Tensor, segments: tuple[Segment, ...], dtype: torch.dtype
) -> None:
    if segments:
        each = key.shape[0] * key.shape[1] * (key.shape[3] + value.shape[3])
        exchange.receive(key.new_empty(0, dtype=dtype), each * sum(segment.length for segment in segments), source)


def _unpacked(message: Tensor | None, segments: tuple[Segment, ...], key: Tensor, value: Tensor) -> dict[Segment, Pair]:
    """The keys and values of a flat message by segment: views of it."""
    found: dict[Segment, Pair] = {}
    if message is None:
        return found
    done = 0
    for segment in segments:
        views = []
        for like in (key, value):
            shape = (*like.shape[:2], segment.length, like.shape[3])
            count = shape[0] * shape[1] * shape[2] * shape[3]
            views.append(message[done : done + count].view(shape))
            done += count
        found[segment] = (views[0], views[1])
    return found


def _columns(x: Tensor | None, segment: Segment) -> Tensor | None:
    return None if x is None else x[:, segment.start : segment.stop]


def _zeros(x: Tensor) -> Tensor:
    return x.new_zeros(x.shape, dtype=compute_dtype(x))
