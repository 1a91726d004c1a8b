"""Context parallelism on paper: compute and transfer times of ring, all-gather and head exchange (Ulysses).

A model, not a measurement: nothing here ran on a GPU. FLOPs and bytes are counted from the shapes and from the plan
that `scaleinv.distributed` follows. Speeds are the inputs below, from the makers' data sheets. Run it to print the
table of docs/context-parallel.md:

    python benchmarks/context_parallel_model.py
    python benchmarks/context_parallel_model.py --gpu h100 --heads 32 --kv-heads 8 --lengths 131072,1048576
"""

from __future__ import annotations

import argparse
import dataclasses

from scaleinv.distributed.layout import Split
from scaleinv.distributed.plan import Plan


@dataclasses.dataclass(frozen=True)
class GPU:
    """A GPU and its links; bytes per second are for one direction."""

    flops: float
    """Dense bfloat16 peak."""
    nvlink: float
    network: float
    """Per GPU, between nodes."""
    node: int = 8


GPUS = {
    "a100": GPU(flops=312e12, nvlink=300e9, network=25e9),  # NVLink 3, HDR InfiniBand
    "h100": GPU(flops=989e12, nvlink=450e9, network=50e9),  # NVLink 4, NDR InfiniBand
}

EFFICIENCY = 0.5
"""Share of the peak that an attention kernel reaches: about what flash attention reports."""

LINK = 0.8
"""Share of a link's speed that messages of megabytes reach."""

LATENCY = 20e-6
"""Seconds before a message moves, launch included."""

HOP = 5e-6
"""Seconds for each further rank that a collective of many ranks goes through."""

FORWARD, BACKWARD = 1.0, 2.5
"""Matrix products of the backward against the forward: five against two."""

BF16, FP32 = 2, 4


@dataclasses.dataclass(frozen=True)
class Shape:
    length: int
    heads: int
    kv_heads: int
    head_dim: int

    def flops(self) -> float:
        """FLOPs of causal attention's forward over the whole sequence: two products over half of the pairs."""
        return 2 * 2 * self.head_dim * self.heads * self.length * (self.length + 1) / 2

    def kv(self, tokens: float) -> float:
        """Elements in the keys and values of this many tokens."""
        return 2 * tokens * self.kv_heads * self.head_dim


def speed(gpu: GPU, ranks: int) -> float:
    """Bytes per second from one GPU to another: over several nodes, each GPU has its own link to the network."""
    return LINK * (gpu.nvlink if ranks <= gpu.node else gpu.network)


def gathering_speed(gpu: GPU, ranks: int) -> float:
    """Bytes per second into each GPU if all gather the same: they enter a node once, over all of its links."""
    return LINK * (gpu.nvlink if ranks <= gpu.node else min(gpu.nvlink, gpu.node * gpu.network))


@dataclasses.dataclass(frozen=True)
class Step:
    """What a rank receives and sends in one step of the ring, in tokens and messages, by the plan."""

    tokens_in: int
    tokens_out: int
    messages: int

    @staticmethod
    def of(plan: Plan, rank: int, step: int) -> Step:
        ranks = plan.split.ranks
        coming = plan.needed(rank, (rank - step) % ranks)
        going = plan.needed((rank + step) % ranks, rank)
        return Step(sum(x.length for x in coming), sum(x.length for x in going), max(len(coming), len(going)))


def ring(shape: Shape, gpu: GPU, ranks: int) -> float:
    """Seconds of forward and backward on the slowest rank: a step takes the longer of computation and messages.

    Rank 0 receives most and the last rank sends most, since late queries see all keys.
    """
    plan = Plan(Split(shape.length, ranks, "zigzag"), causal=True, window=None)
    compute = shape.flops() / ranks / ranks / (EFFICIENCY * gpu.flops)
    rate = speed(gpu, ranks)
    slowest = 0.0
    for rank in {0, ranks // 2, ranks - 1}:
        total = (FORWARD + BACKWARD) * compute  # the rank's own block, with nothing to wait for
        for step in (Step.of(plan, rank, number) for number in range(1, ranks)):
            coming, going = shape.kv(step.tokens_in), shape.kv(step.tokens_out)
            forward = step.messages * LATENCY + max(coming, going) * BF16 / rate
            # The keys travel again. Gradients go the other way: those of what came are sent, of what went received.
            into, out = coming * BF16 + going * FP32, going * BF16 + coming * FP32
            backward = 2 * step.messages * LATENCY + max(into, out) / rate
            total += max(FORWARD * compute, forward) + max(BACKWARD * compute, backward)
        slowest = max(slowest, total)
    return slowest


def all_gather(shape: Shape, gpu: GPU, ranks: int) -> float:
    """Seconds if all keys come first, and gradients are reduced last: nothing is hidden."""
    compute = (FORWARD + BACKWARD) * shape.flops() / ranks / (EFFICIENCY * gpu.flops)
    elements = shape.kv(shape.length * (ranks - 1) / ranks)
    collectives = 3 * (LATENCY + (ranks - 1) * HOP)
    return compute + collectives + elements * (BF16 + BF16 + FP32) / gathering_speed(gpu, ranks)


def gathered(shape: Shape) -> float:
    """Bytes that each rank holds if it gathers all keys: with their gradients in float32, in the backward."""
    return shape.kv(shape.length) * (BF16 + FP32)


def exchange(shape: Shape, gpu: GPU, ranks: int) -> float | None:
    """Seconds if heads are exchanged for tokens (Ulysses); None unless the ranks divide the key heads."""
    if shape.kv_heads % ranks:
        return None
    compute = (FORWARD + BACKWARD) * shape.flops() / ranks / (EFFICIENCY * gpu.flops)
    tokens = shape.length / ranks * (ranks - 1) / ranks
    elements = tokens * 2 * (shape.heads + shape.kv_heads) * shape.head_dim  # q, k, v there, out back
    collectives = 4 * (LATENCY + (ranks - 1) * HOP)
    return compute + collectives + elements * (BF16 + BF16) / speed(gpu, ranks)  # as much in the backward


def table(gpu_name: str, lengths: list[int], rank_counts: list[int], heads: int, kv_heads: int, head_dim: int) -> str:
    gpu = GPUS[gpu_name]
    lines = [
        f"{gpu_name}: {heads} heads, {kv_heads} key heads, head dim {head_dim}, one layer, forward and backward",
        f"{'tokens':>10}{'GPUs':>6}{'compute':>10}{'ring':>10}{'all-gather':>12}{'heads':>10}{'gathered':>10}  best",
    ]
    for length in lengths:
        for ranks in rank_counts:
            shape = Shape(length, heads, kv_heads, head_dim)
            compute = (FORWARD + BACKWARD) * shape.flops() / ranks / (EFFICIENCY * gpu.flops)
            times = {
                "ring": ring(shape, gpu, ranks),
                "all-gather": all_gather(shape, gpu, ranks),
                "heads": exchange(shape, gpu, ranks),
            }
            best = min((time, name) for name, time in times.items() if time is not None)[1]
            cells = [_time(time) for time in (compute, *times.values())]
            lines.append(
                f"{length:>10,}{ranks:>6}{cells[0]:>10}{cells[1]:>10}{cells[2]:>12}{cells[3]:>10}"
                f"{gathered(shape) / 1e9:>7.1f} GB  {best}"
            )
    return "\n".join(lines)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=(*GPUS, "all"), default="all")
    parser.add_argument("--lengths", default="131072,1048576,4194304")
    parser.add_argument("--ranks", default="8,32,128,512")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    options = parser.parse_args()
    lengths, ranks = ([int(word) for word in text.split(",")] for text in (options.lengths, options.ranks))
    for name in GPUS if options.gpu == "all" else [options.gpu]:
        print(table(name, lengths, ranks, options.heads, options.kv_heads, options.head_dim))
        print()


if __name__ == "__main__":
    main()
