"""Messages between the ranks of a ring, in flight while the caller computes."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import re
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclasses.dataclass
class Traffic:
    """What this rank sent, and how long it waited for others."""

    messages: int = 0
    bytes: int = 0
    waited: float = 0.0
    """Seconds spent waiting for messages that computation did not hide. (On a GPU the stream waits, not the host.)"""


_traffic: contextvars.ContextVar[Traffic | None] = contextvars.ContextVar("traffic", default=None)


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Count the messages that attention sends inside, forward and backward.

    >>> with counted() as traffic:
    ...     pass
    >>> traffic.messages
    0
    """
    traffic = Traffic()
    token = _traffic.set(traffic)
    try:
        yield traffic
    finally:
        _traffic.reset(token)


class Exchange:
    """Sends to one rank and receives from another; `wait` returns what came. All ranks make it at the same point."""

    def __init__(self, mesh: DeviceMesh, tag: int, traffic: Traffic | None = None) -> None:
        self.mesh, self.tag = mesh, tag
        self.traffic = traffic
        self.operations: list[dist.P2POp] = []
        self.requests: list[dist.Work] = []
        self.received: Tensor | None = None

    def send(self, x: Tensor, to: int) -> None:
        """Add a message to rank ``to`` of the mesh."""
        self.operations.append(dist.P2POp(dist.isend, x, group=self.mesh.get_group(), group_peer=to, tag=self.tag))
        if self.traffic is not None:
            self.traffic.messages += 1
            self.traffic.bytes += x.numel() * x.element_size()

    def receive(self, into: Tensor, source: int) -> None:
        """Expect a message from rank ``source`` of the mesh."""
        self.received = into
        self.operations.append(
            dist.P2POp(dist.irecv, into, group=self.mesh.get_group(), group_peer=source, tag=self.tag)
        )

    def start(self) -> Exchange:
        """Start sending and receiving the messages."""
        if self.operations:
            with explained(_name(self.mesh)):
                self.requests = dist.batch_isend_irecv(self.operations)
        return self

    def wait(self) -> Tensor | None:
        """Wait until all is sent and received; returns the received message, flat."""
        began = time.monotonic()
        with explained(_name(self.mesh)):
            for request in self.requests:
                request.wait()
        if self.traffic is not None:
            self.traffic.waited += time.monotonic() - began
        self.operations, self.requests = [], []
        received, self.received = self.received, None
        return received


def current_traffic() -> Traffic | None:
    """The counter of the innermost `counted`, or None."""
    return _traffic.get()


def all_parts(part: Tensor, mesh: DeviceMesh) -> list[Tensor]:
    """Every rank's part, in the order of ranks."""
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(mesh.size())]
    with explained(_name(mesh)):
        dist.all_gather(parts, part, group=mesh.get_group())
    return parts


def _name(mesh: DeviceMesh) -> str:
    return f"rank {mesh.get_local_rank()} of the context mesh"


class RankLost(RuntimeError):
    """Another rank died, stopped or called something else."""


@contextlib.contextmanager
def explained(who: str) -> Iterator[None]:
    """Turn the network library's errors into a `RankLost` that says in one line what happened to ``who``."""
    try:
        yield
    except RankLost:
        raise
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not _NETWORK.search(str(error)):
            raise
        line = next((line for line in str(error).splitlines() if _NETWORK.search(line)), type(error).__name__)
        reason = _NOISE.sub("", line).strip().rstrip(".")
        raise RankLost(f"{who} lost another rank: it died, stopped or called something else ({reason})") from error


_NETWORK = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out", re.IGNORECASE)
_NOISE = re.compile(r"\[\S*\.(cc|cpp|h):\d+\]|This is typically caused by.*|Check the logs of.*")
