"""Speed and memory of scale-invariant attention beside plain attention, FlexAttention and the reference.

All contestants run in turn in one process, round after round, so that a slow spell of the machine hits all of them; the
table gives medians and their ratio to SDPA's in the same run. SDPA is *plain* causal attention: it does less work.

    make bench                                   # about 15 minutes on 2 cores
    python benchmarks/attention.py --quick       # 1k and 4k, about 3 minutes
    python benchmarks/attention.py --long        # 64k too

Writes results/bench/attention.csv, attention.png and attention.svg.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

import scaleinv
from scaleinv.lengths import tokens_label
from scaleinv.machine import cpu_name
from scaleinv.plots import style

HEADS = 6
OURS = "scale-invariant"
Contestants = dict[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1k and 4k tokens, 4k and 64k keys")
    parser.add_argument("--long", action="store_true", help="64k tokens too")
    parser.add_argument("--no-flex", action="store_true", help="leave FlexAttention out (it compiles for each shape)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9, help="at most; slow cases take fewer (default: 9)")
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    parser.add_argument("--memory-of", nargs=3, metavar=("OP", "BACKEND", "LENGTH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        return measure_memory(*options.memory_of)

    lengths = [1024, 4096] if options.quick else [1024, 4096, 16384]
    caches = [4096, 65536] if options.quick else [4096, 65536, 262144]
    if options.long:
        lengths.append(65536)
    flops = gemm_rate()
    say(f"torch {torch.__version__}, {cpu_name()}, {options.threads} threads, GEMM {flops / 1e9:.0f} GFLOP/s")
    rows: list[dict[str, object]] = []
    for head_dim in (128, 64):
        for length in lengths:
            for op in ("forward", "forward+backward"):
                cases = training_cases(op, length, head_dim, flex=not options.no_flex)
                work = (4 if op == "forward" else 14) * HEADS * head_dim * length * (length + 1) / 2
                rows += compare(op, head_dim, length, cases, options.rounds, work, flops)
    for keys in caches:
        rows += compare("decode", 128, keys, decoding_cases(keys, 128), 41, None, flops)
    for length in lengths if options.quick else [*lengths, 65536]:
        rows += memory_rows(length, options.threads)
    stamp = {"torch": torch.__version__, "cpu": cpu_name(), "threads": options.threads, "gemm_gflops": flops / 1e9}
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / "attention.csv"
    fields = ["op", "head_dim", "length", "backend", "metric", "median", "p20", "p80", "ratio_to_sdpa", "gemm_fraction"]
    with target.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*fields, *stamp])
        writer.writeheader()
        writer.writerows({**row, **stamp} for row in rows)
    picture = draw(rows, options.out)
    say(f"wrote {target} and {picture}")


def training_cases(op: str, length: int, head_dim: int, flex: bool) -> Contestants:
    q, k, v, grad = torch.randn(4, 1, HEADS, length, head_dim, generator=torch.Generator().manual_seed(0)).unbind(0)
    backward = op == "forward+backward"
    if backward:
        q, k, v = (x.clone().requires_grad_() for x in (q, k, v))

    def case(run: Callable[[], torch.Tensor]) -> Callable[[], object]:
        if not backward:
            return run

        def both() -> None:
            q.grad = k.grad = v.grad = None
            run().backward(grad)

        return both

    cases = {
        "sdpa": case(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        OURS: case(lambda: scaleinv.attention(q, k, v)),
    }
    if length <= 4096:
        cases["blocked-torch"] = case(lambda: scaleinv.attention(q, k, v, backend="blocked-torch"))
        cases["reference"] = case(lambda: scaleinv.attention(q, k, v, backend="reference"))
    if flex and not backward and length <= 16384:  # no backward on CPU
        cases["flex"] = case(lambda: scaleinv.attention(q, k, v, backend="flex"))
    return cases


def decoding_cases(keys: int, head_dim: int) -> Contestants:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, HEADS, 1, head_dim, generator=generator)
    k, v = torch.randn(2, 1, HEADS, keys, head_dim, generator=generator).unbind(0)
    return {
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v),
        OURS: lambda: scaleinv.attention(q, k, v),
    }


def compare(
    op: str, head_dim: int, length: int, cases: Contestants, rounds: int, work: float | None, flops: float
) -> list[dict[str, object]]:
    """Run the cases in turn; print and return one row per case."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    with torch.set_grad_enabled(op == "forward+backward"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for run in cases.values():  # compile, build, touch memory
            run()
        began = time.perf_counter()
        for turn in range(rounds):
            for name, run in cases.items():
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
            if turn >= 2 and time.perf_counter() - began > 40:
                break
    base = statistics.median(times["sdpa"])
    rows = []
    for name, values in times.items():
        p20, median, p80 = (statistics.quantiles(values, n=10)[i] if len(values) > 1 else values[0] for i in (1, 4, 7))
        fraction = work / median / flops if work else None
        rows.append(
            {
                "op": op,
                "head_dim": head_dim,
                "length": length,
                "backend": name,
                "metric": "ms",
                "median": median * 1e3,
                "p20": p20 * 1e3,
                "p80": p80 * 1e3,
                "ratio_to_sdpa": median / base,
                "gemm_fraction": fraction,
            }
        )
        share = f"{fraction:5.0%} of GEMM" if fraction else ""
        case = f"{op:17} D={head_dim:<3} N={length:<6} {name:15}"
        say(f"{case} {median * 1e3:10.2f} ms  {median / base:6.2f} x SDPA {share}")
    return rows


def memory_rows(length: int, threads: int) -> list[dict[str, object]]:
    """Peak memory beyond inputs, output and gradients, each case in a process of its own."""
    rows = []
    for op in ("forward", "forward+backward"):
        for backend in ("sdpa", OURS, "reference"):
            if backend == "reference" and length > 4096:
                continue  # N x N matrices
            if op == "forward+backward" and length > 16384:
                continue  # it would take minutes and show nothing new
            command = [sys.executable, __file__, "--threads", str(threads), "--memory-of", op, backend, str(length)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            extra = json.loads(done.stdout)["extra_mib"]
            say(f"{op:17} D=128 N={length:<6} {backend:15} {extra:10.1f} MiB extra memory")
            rows.append(
                {
                    "op": op,
                    "head_dim": 128,
                    "length": length,
                    "backend": backend,
                    "metric": "MiB",
                    "median": extra,
                }
            )
    return rows


def measure_memory(op: str, backend: str, length: str) -> None:
    """Print how far the peak rises above what the inputs and results of the call take."""
    n = int(length)
    with torch.set_grad_enabled(op == "forward+backward"):
        training_cases(op, 64, 128, flex=False)[backend]()  # libraries loaded, kernel built
        case = training_cases(op, n, 128, flex=False)[backend]
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        before = memory_line("VmRSS")
        case()
    results = (1 if op == "forward" else 4) * HEADS * n * 128 * 4 / 1024  # out; and grads of q, k, v
    print(json.dumps({"extra_mib": max(memory_line("VmHWM") - before - results, 0) / 1024}))


def memory_line(name: str) -> int:
    """A line of Linux's account of this process, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def gemm_rate() -> float:
    """FLOP/s of a 2048-cube matrix product: the limit that all of this is measured against."""
    a, b = torch.randn(2, 2048, 2048).unbind(0)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return 2 * 2048**3 / min(times)


LOOKS = {
    OURS: style.Look("scale-invariant", "#000000", "o"),
    "sdpa": style.Look("plain (SDPA)", "#0077BB", "s"),
    "flex": style.Look("FlexAttention", "#EE7733", "D", "--"),
    "reference": style.Look("reference", "#AAAAAA", "v", ":"),
    "blocked-torch": style.Look("blocked, torch", "#117733", "^", "--"),
}


def draw(rows: list[dict[str, object]], folder: Path) -> Path:
    """Ratio to SDPA by length, one panel for each operation, as ``attention.png`` and ``attention.svg``."""
    panels = [("forward", 128), ("forward", 64), ("forward+backward", 128), ("forward+backward", 64), ("decode", 128)]
    with style.applied():
        figure, axes = style.panels(len(panels), width=3.2)
        figure.set_figwidth(figure.get_figwidth() + 1.6)
        for axis, (op, head_dim) in zip(axes, panels, strict=True):
            for backend, look in LOOKS.items():
                points = [
                    (row["length"], row["ratio_to_sdpa"])
                    for row in rows
                    if (row["op"], row["head_dim"], row["backend"], row["metric"]) == (op, head_dim, backend, "ms")
                ]
                if points:
                    x, y = zip(*points, strict=True)
                    axis.plot(x, y, marker=look.marker, color=look.color, ls=look.dashes, label=look.label)
            axis.set(xscale="log", yscale="log", xlabel="keys" if op == "decode" else "tokens")
            shown = (op, head_dim, "ms")
            lengths = sorted({row["length"] for row in rows if (row["op"], row["head_dim"], row["metric"]) == shown})
            axis.set_xticks(lengths, [tokens_label(length) for length in lengths])
            ticks = [0.5, 1, 2, 5, 10, 20]
            axis.set_yticks(ticks, [str(tick) for tick in ticks])
            axis.minorticks_off()
            axis.set_title(f"{op}, head dim {head_dim}")
        axes[0].set_ylabel("time / SDPA's time")
        named = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend(named.values(), named.keys(), loc="outside right center", fontsize=9)
    return style.save(figure, folder, "attention")[0]


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
