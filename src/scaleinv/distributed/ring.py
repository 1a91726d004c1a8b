"""One sequence over several ranks: keys and values travel in a ring, queries stay.

Each rank computes the blocks of its own queries and merges them by their log-sum-exps, in float32. In the backward the
keys travel again, and their gradients return to their owners in float32. While a block is computed, the next one is on
its way.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
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

Hop = tuple[int, int]
"""A message's place in the ring: from rank r to rank r + step, and which of r's segments."""


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

    def hops(self) -> list[Hop]:
        """The messages of the ring in order, the same on every rank: how many ranks ahead, and which segment."""
        segments = range(len(self.plan.split.segments(self.rank)))
        return [(step, number) for step in range(1, self.size) for number in segments]

    def needed(self, rank: int, owner: int, number: int) -> Segment | None:
        """A segment of ``owner`` if the queries of ``rank`` see it."""
        segment = self.plan.split.segments(owner)[number]
        return segment if segment in self.plan.needed(rank, owner) else None

    def visitor(self, hop: Hop) -> Segment | None:
        """The segment that comes to this rank in a hop."""
        step, number = hop
        return self.needed(self.rank, (self.rank - step) % self.size, number)

    def visited(self, hop: Hop) -> Segment | None:
        """This rank's own segment that goes elsewhere in a hop."""
        step, number = hop
        return self.needed((self.rank + step) % self.size, self.rank, number)

    def pass_on(self, hop: Hop, packed: dict[Segment, Tensor], key: Tensor, value: Tensor) -> Exchange:
        """Start a hop: send a segment some ranks ahead, receive one from as many behind."""
        exchange = Exchange(self.mesh, _tag(hop, PASSING), self.traffic)
        step, _ = hop
        going, coming = self.visited(hop), self.visitor(hop)
        if going is not None:
            exchange.send(packed[going], (self.rank + step) % self.size)
        if coming is not None:
            exchange.receive(_flat(coming, key, value, key.dtype), (self.rank - step) % self.size)
        return exchange.start()

    def return_home(self, hop: Hop, grads: Tensor | None, key: Tensor, value: Tensor) -> Exchange:
        """Send the gradients of a visiting segment to its owner, and receive those of this rank's own."""
        exchange = Exchange(self.mesh, _tag(hop, RETURNING), self.traffic)
        step, _ = hop
        own = self.visited(hop)
        if grads is not None:
            exchange.send(grads, (self.rank - step) % self.size)
        if own is not None:
            exchange.receive(_flat(own, key, value, compute_dtype(key)), (self.rank + step) % self.size)
        return exchange.start()

    @property
    def ahead(self) -> int:
        """How many hops are in flight while a block is computed: all segments of the next rank.

        With zigzag a rank needs one segment of some ranks, so the very next hop may bring nothing. All ranks must start
        their messages in the same order, so none may look further ahead than the others.
        """
        return max(1, len(self.plan.split.segments(self.rank)))  # without tokens there are none

    def visits(self, key: Tensor, value: Tensor) -> Iterator[tuple[Hop | None, dict[Segment, Pair]]]:
        """Keys and values by segment: this rank's own, then each hop's, while those of the next are in flight."""
        held, hops = self.local(key, value), self.hops()
        packed = {own: _packed(*held[own]) for own in held if any(self.visited(hop) == own for hop in hops)}
        coming = deque(self.pass_on(hop, packed, key, value) for hop in hops[: self.ahead])
        yield None, held
        for place, hop in enumerate(hops):
            message, segment = coming.popleft().wait(), self.visitor(hop)
            if place + self.ahead < len(hops):
                coming.append(self.pass_on(hops[place + self.ahead], packed, key, value))
            if not coming:
                packed.clear()
            visiting = {} if message is None or segment is None else {segment: _views(message, segment, key, value)}
            del message  # the caller may free it before it asks for the next
            yield hop, visiting

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
                del call
            visiting.clear()
        ctx.save_for_backward(query, key, value, gain, shift, out, lse)
        ctx.ring = ring
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, gain, shift, out, lse = ctx.saved_tensors  # read once: checkpointing allows no more
        ring: Ring = ctx.ring
        table_grads = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        delta = row_delta(grad_out, grad_lse, out, lse)
        grad_query, grad_key, grad_value = (x.new_zeros(x.shape, dtype=compute_dtype(x)) for x in (query, key, value))
        grad_gain, grad_shift = (torch.zeros_like(x) if table_grads else None for x in (gain, shift))
        home = ring.local(grad_key, grad_value)  # views: arriving gradients are added in place
        returning: deque[tuple[Hop, Exchange]] = deque()
        for hop, visiting in ring.visits(key, value):
            flat: Tensor | None = None
            grads = home
            if hop is not None:
                flat, grads = _gradients(visiting, key, value)
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
                del call, found  # memory of one block at a time
            while visiting and returning:  # this block has hidden them
                _add_home(ring, *returning.popleft(), home)
            visiting.clear()
            if hop is not None:
                returning.append((hop, ring.return_home(hop, flat, grad_key, grad_value)))
        for back in returning:
            _add_home(ring, *back, home)
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


def _add_home(ring: Ring, hop: Hop, exchange: Exchange, home: dict[Segment, Pair]) -> None:
    """Wait for the gradients of this rank's keys from the rank that they visited, and add them."""
    message, own = exchange.wait(), ring.visited(hop)
    if message is not None and own is not None:
        for total, part in zip(home[own], _views(message, own, *home[own]), strict=True):
            total += part


def _gradients(visiting: dict[Segment, Pair], key: Tensor, value: Tensor) -> tuple[Tensor | None, dict[Segment, Pair]]:
    """Zeros for the gradients of a visiting segment: the message that they will be, and views of it."""
    for segment in visiting:
        flat = _flat(segment, key, value, compute_dtype(key)).zero_()
        return flat, {segment: _views(flat, segment, key, value)}
    return None, {}


def _tag(hop: Hop, direction: int) -> int:
    """A message's number, different for all messages of a pass; a rank has at most two segments."""
    step, number = hop
    return 4 * step + 2 * number + direction


def _packed(key: Tensor, value: Tensor) -> Tensor:
    """Keys and values of a segment as one message."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _flat(segment: Segment, key: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty message for a segment of tensors like these."""
    each = key.shape[0] * key.shape[1] * (key.shape[3] + value.shape[3])
    return key.new_empty(each * segment.length, dtype=dtype)


def _views(message: Tensor, segment: Segment, key: Tensor, value: Tensor) -> Pair:
    """The keys and values of a message: views of it in the shapes of tensors like these."""
    shapes = [(*x.shape[:2], segment.length, x.shape[3]) for x in (key, value)]
    first, second = message.split([math.prod(shape) for shape in shapes])
    return first.view(shapes[0]), second.view(shapes[1])


def _columns(x: Tensor | None, segment: Segment) -> Tensor | None:
    return None if x is None else x[:, segment.start : segment.stop]
