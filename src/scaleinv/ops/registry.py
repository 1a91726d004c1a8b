"""The backends, in the order in which `auto` prefers them.

A backend is a module with two functions:

    obstacle(call: Call) -> str | None              why it cannot serve the call; None if it can
    run(call: Call) -> tuple[Tensor, Tensor | None] output in value's dtype, and logsumexp if ``call.return_lse``

To add one, write its file and add its line to `BACKENDS`. The shared cases of tests/ops then run it. One that computes
blocks of a longer sequence (see `scaleinv.ops.operator`) names as its ``engine`` the module that runs calls that way.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from torch import Tensor

from scaleinv.ops import agreement, blocked, flex, native, reference, triton
from scaleinv.ops.call import Call
from scaleinv.ops.triton import blocks


class Module(Protocol):
    """What a backend's module offers."""

    def obstacle(self, call: Call) -> str | None: ...
    def run(self, call: Call) -> tuple[Tensor, Tensor | None]: ...


@dataclasses.dataclass(frozen=True)
class Backend:
    """A registered backend."""

    name: str
    module: Module
    family: str | None = None
    """A name that several backends share: asking for it takes the first of them that can serve the call."""
    auto_on: tuple[str, ...] | None = None
    """Types of device on which `auto` may choose it; None for all."""
    proven: bool = False
    """Whether `auto` chooses it only after it has agreed with the reference on this machine."""

    engine: Module | None = None
    """What runs a call as the blocks of a longer sequence are run; None if the backend computes no such blocks."""

    def answers_to(self, name: str, device: str) -> bool:
        """Whether a request for ``name`` on that type of device may be served by this backend."""
        if name == "auto":
            return self.auto_on is None or device in self.auto_on
        return name in (self.name, self.family)


BACKENDS = (
    Backend("triton", triton, auto_on=("cuda",), proven=True, engine=blocks),
    Backend("flex", flex, auto_on=("cuda",)),
    Backend("blocked-native", native, family="blocked", engine=native),
    Backend("blocked-torch", blocked, family="blocked", engine=blocked),
    Backend("reference", reference, auto_on=()),
)


NAMES = tuple(
    dict.fromkeys(["auto", *(x.family for x in BACKENDS if x.family is not None), *(x.name for x in BACKENDS)])
)
"""What the argument ``backend`` of `scaleinv.attention` takes."""


def choose(name: str, call: Call, in_blocks: bool = False) -> Backend:
    """The first backend that answers to ``name`` and can serve the call; ValueError with the reason if none can.

    Args:
        in_blocks: only those that can compute one block of a longer sequence.
    """
    if name not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(NAMES)}, got {name!r}")
    obstacles = []
    for backend in BACKENDS:
        if backend.answers_to(name, call.device.type):
            module = backend.engine if in_blocks else backend.module
            if module is None:
                obstacles.append(f"{backend.name} cannot compute part of a sequence")
                continue
            obstacle = module.obstacle(call)
            if obstacle is None and name == "auto" and backend.proven:
                obstacle = agreement.doubt(module, call)
            if obstacle is None:
                return backend
            obstacles.append(obstacle)
    raise ValueError(f"backend={name!r} cannot serve this call: {'; '.join(obstacles)}")
