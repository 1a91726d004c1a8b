"""Context parallelism measured on this machine: memory, work and waiting of each rank, on 1, 2 and 4 gloo processes.

    python benchmarks/context_parallel.py                      # 65,536 tokens, a minute or two on two cores
    python benchmarks/context_parallel.py --tokens 16384 --layouts zigzag,contiguous

Ranks share the cores of this machine, so times show what waiting costs here, not how fast a cluster would be.

Memory is what a rank holds at most beyond what it held after a small call, so libraries and connections do not count.
glibc keeps freed blocks of up to 32 MiB, which is its own affair: the ranks run with a fixed MALLOC_MMAP_THRESHOLD_, so
that freed memory returns to the system and the peak is what is in use. Linux only.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh

import scaleinv
from scaleinv import distributed
from scaleinv.distributed.layout import Split
from scaleinv.distributed.plan import Plan
from scaleinv.files import write_csv

HEADS, KV_HEADS, DIM = 4, 2, 64


def memory(name: str) -> float:
    """A line of /proc/self/status in MiB: VmRSS is what this process holds, VmHWM the most since `forget_peak`."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def rank_main(rank: int, ranks: int, tokens: int, layout: str, port: int, results) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))["cp"]
    torch.manual_seed(rank)
    logits = scaleinv.ScaleInvariant()
    for _ in range(2):  # builds and loads the kernel, opens the connections
        small = [torch.randn(1, heads, 64, DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        distributed.attention(*small, logits, mesh=mesh, layout=layout).sum().backward()
    forget_peak()
    before = memory("VmRSS")
    part = tokens // ranks
    query, key, value = (torch.randn(1, heads, part, DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
    dist.barrier()
    began = time.perf_counter()
    with distributed.counted() as traffic:
        distributed.attention(query, key, value, logits, mesh=mesh, layout=layout).sum().backward()
    most, after = memory("VmHWM") - before, memory("VmRSS") - before
    seconds = time.perf_counter() - began
    plan = Plan(Split(tokens, ranks, layout), causal=True, window=None)
    results.put(
        {
            "tokens": tokens,
            "layout": layout,
            "ranks": ranks,
            "rank": rank,
            "memory_mib": round(most, 1),
            "kept_mib": round(after, 1),
            "pairs": plan.pairs(rank),
            "messages": traffic.messages,
            "sent_mib": round(traffic.bytes / 2**20, 1),
            "seconds": round(seconds, 3),
            "waiting_share": round(traffic.waited / seconds, 4),
        }
    )
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks: int, tokens: int, layout: str) -> list[dict]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(rank_main, (ranks, tokens, layout, port, results), nprocs=ranks)
    return sorted((results.get() for _ in range(ranks)), key=lambda row: row["rank"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--layouts", default="zigzag,contiguous")
    parser.add_argument("--out", type=Path, default=Path("results/bench/context-parallel.csv"))
    options = parser.parse_args()
    print(f"{HEADS} heads, {KV_HEADS} key heads, head dim {DIM}, float32, forward and backward, {os.cpu_count()} cores")
    columns = {
        "layout": 12,
        "ranks": 6,
        "memory of a rank": 18,
        "kept after": 14,
        "work, most/least": 18,
        "sent by a rank": 16,
    }
    print("".join(f"{name:>{width}}" for name, width in columns.items()) + f"{'waiting':>9}")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # the ranks read it when they start
    rows = []
    for layout in options.layouts.split(","):
        for ranks in map(int, options.ranks.split(",")):
            found = measure(ranks, options.tokens, layout)
            rows += found
            most = max(row["memory_mib"] for row in found)
            kept = max(row["kept_mib"] for row in found)
            work = max(row["pairs"] for row in found) / min(row["pairs"] for row in found)
            sent = max(row["sent_mib"] for row in found)
            waiting = max(row["waiting_share"] for row in found)
            print(
                f"{layout:>12}{ranks:>6}{most:>14.0f} MiB{kept:>10.0f} MiB{work:>18.3f}{sent:>12.1f} MiB{waiting:>8.1%}"
            )
    write_csv(options.out, rows)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
