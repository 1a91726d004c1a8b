"""While a block is computed, the next one is on its way."""

import itertools

import pytest
import torch

from scaleinv.distributed import ring as module
from scaleinv.distributed.layout import Split
from scaleinv.distributed.plan import Plan
from scaleinv.distributed.ring import Ring, RingAttention


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What one rank does, in order; its messages hold zeros."""
    done: list[str] = []

    class Recorded:
        def __init__(self, mesh: object, tag: int, traffic: object) -> None:
            self.name = f"{'gradients' if tag % 2 else 'keys'} {tag // 4}" + ".back" * (tag // 2 % 2)
            self.received: torch.Tensor | None = None

        def send(self, x: torch.Tensor, to: int) -> None:
            pass

        def receive(self, into: torch.Tensor, source: int) -> None:
            self.received = into.zero_()

        def start(self) -> "Recorded":
            done.append(f"start {self.name}")
            return self

        def wait(self) -> torch.Tensor | None:
            done.append(f"wait {self.name}")
            return self.received

    def compute(original, name):
        def run(engine, call, *given):
            done.append(name)
            return original(engine, call, *given)

        return run

    monkeypatch.setattr(module, "Exchange", Recorded)
    for name in ("block_forward", "block_backward"):
        monkeypatch.setattr(module, name, compute(getattr(module, name), "compute"))
    return done


def test_the_next_block_travels_while_this_one_is_computed(events: list[str]) -> None:
    plan = Plan(Split(12, 3, "contiguous"), False, None)
    tables = torch.ones(1, 23), torch.zeros(1, 23)
    x = [torch.randn(1, 1, 4, 4, requires_grad=True) for _ in range(3)]
    out, _ = RingAttention.apply(*x, *tables, Ring(plan, None, 0, "blocked-torch", 0.5, None))
    forward = ["start keys 1", "compute", "wait keys 1", "start keys 2", "compute", "wait keys 2", "compute"]
    assert events == forward
    events.clear()
    out.sum().backward()
    assert events == [
        *forward[:5],  # the gradients of block 1 go home while block 2 is computed
        "start gradients 1",
        "wait keys 2",
        "compute",
        "wait gradients 1",
        "start gradients 2",
        "wait gradients 2",
    ]


@pytest.mark.parametrize("rank", range(4))
def test_segments_that_do_not_come_delay_nothing(events: list[str], rank: int) -> None:
    """With zigzag some hops bring nothing: what comes after them is on its way all the same."""
    plan = Plan(Split(16, 4, "zigzag"), True, None)
    hidden = torch.arange(31) > 15
    tables = torch.ones(1, 31).masked_fill(hidden, 0), torch.zeros(1, 31).masked_fill(hidden, -torch.inf)
    x = [torch.randn(1, 1, 4, 4, requires_grad=True) for _ in range(3)]
    ring = Ring(plan, None, rank, "blocked-torch", 0.5, None)
    out, _ = RingAttention.apply(*x, *tables, ring)
    out.sum().backward()
    both = "".join(f"{event}\n" for event in events).split("start keys 1\n")[1:]
    bringing = [f"{step}{'.back' * number}" for step, number in ring.hops() if ring.visitor((step, number))]
    for lines in (("start keys 1\n" + part).splitlines() for part in both):
        for this, following in itertools.pairwise(bringing):
            computed = lines.index("compute", lines.index(f"wait keys {this}"))
            assert lines.index(f"start keys {following}") < computed
