"""Speed of certified decoding beside SDPA and our exact decoding: 6 heads of 128 channels, float32.

All contestants take a step in turn, round after round, so that a slow spell of the machine hits all of them; the table
gives medians and the ratio to SDPA's in the same run. Keys and queries have unit variance, so that scores are Gaussian;
"mean -1.5" moves every key against its query until the scores have that mean, as in trained models.

    make bench                                   # with the other benchmarks
    python benchmarks/decoding.py --quick        # up to 65,536 keys
    python benchmarks/decoding.py                # up to 262,144 keys of 6 heads and 1,048,576 of one: 8 GiB of memory

Writes results/decode/speed.csv and speed.png, and prints the table of docs/decoding.md.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import scaleinv
from scaleinv.machine import cpu_name

HEADS, DIM = 6, 128
SCORES = {"gaussian": 0.0, "mean -1.5": -1.5}
FIELDS = ("heads", "keys", "scores", "contestant", "ms", "p20", "p80", "speedup", "read", "mass", "error", "mib")
Row = dict[str, object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 65,536 keys")
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--out", type=Path, default=Path("results/decode"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {cpu_name()}, {options.threads} threads, tolerance {options.tolerance:g}")
    sizes = [(HEADS, keys) for keys in (4096, 16384, 65536, 262144)] + [(1, 1 << 20)]
    rows: list[Row] = []
    for heads, keys in sizes[:3] if options.quick else sizes:
        for scores, mean in SCORES.items():
            rows += measure(heads, keys, scores, mean, options.tolerance, options.rounds)
    stamp = {"torch": torch.__version__, "cpu": cpu_name(), "threads": options.threads, "tolerance": options.tolerance}
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "speed.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*FIELDS, *stamp])
        writer.writeheader()
        writer.writerows({**row, **stamp} for row in rows)
    draw(rows, options.out / "speed.png")
    print(f"wrote {options.out / 'speed.csv'} and {options.out / 'speed.png'}\n\n{table(rows)}")


def inputs(heads: int, keys: int, mean: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(keys)
    query = F.rms_norm(torch.randn(1, heads, 1, DIM, generator=generator), (DIM,))
    key, value = torch.randn(2, 1, heads, keys, DIM, generator=generator).unbind(0)
    return query, key.add_(query, alpha=mean / DIM**0.5), value


def measure(heads: int, keys: int, scores: str, mean: float, tolerance: float, rounds: int) -> list[Row]:
    """Times of a step of each contestant, and of appending one token."""
    query, key, value = inputs(heads, keys, mean)
    cache = scaleinv.CertifiedCache(tolerance=tolerance)
    cache.append(key, value)
    memory = cache.nbytes / 2**20
    plain = scaleinv.CertifiedCache(scaleinv.Plain(), tolerance)
    for name in ("pages", "length", "_addresses", "_native"):  # the same memory
        setattr(plain, name, getattr(cache, name))
    room = scaleinv.CertifiedCache(tolerance=tolerance)
    room.append(key[:, :, :700], value[:, :, :700])
    token = key[:, :, :1].clone(), value[:, :, :1].clone()
    contestants: dict[str, Callable[[], object]] = {
        "sdpa": lambda: F.scaled_dot_product_attention(query, key, value),
        "exact": lambda: scaleinv.attention(query, key, value),
        "certified": lambda: cache.attend(query),
        "certified, plain attention": lambda: plain.attend(query),
        "append a token": lambda: room.append(*token),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            if turn:  # the first round touches the memory
                times[name].append((time.perf_counter() - start) * 1e3)
    certificates = {"certified": cache.attend(query)[1], "certified, plain attention": plain.attend(query)[1]}
    base = statistics.median(times["sdpa"])
    rows: list[Row] = []
    for name, values in times.items():
        p20, median, p80 = (statistics.quantiles(values, n=10)[i] for i in (1, 4, 7))
        row: Row = {"heads": heads, "keys": keys, "scores": scores, "contestant": name, "ms": median, "p20": p20}
        row |= {"p80": p80, "speedup": base / median}
        certificate = certificates.get(name)
        if certificate is not None:
            row |= {"read": float(certificate.read.mean()), "mass": float(certificate.mass.max())}
            row |= {"error": float(certificate.error.max()), "mib": memory}
        rows.append(row)
        share = f"{row['read']:7.2%} read" if certificate is not None else ""
        print(f"{heads} x {keys:<8} {scores:10} {name:27} {median:9.2f} ms {base / median:6.2f} x {share}", flush=True)
    return rows


def table(rows: list[Row]) -> str:
    """The table of docs/decoding.md, in Markdown."""
    found = {(row["heads"], row["keys"], row["scores"], row["contestant"]): row for row in rows}
    lines = ["| keys | Gaussian scores | scores of mean −1.5 | keys read | our exact decoding | appending a token |"]
    lines.append("| --- " * 6 + "|")
    for heads, keys in dict.fromkeys((row["heads"], row["keys"]) for row in rows):
        certified, exact, append = (
            [found[heads, keys, scores, name] for scores in SCORES] for name in ("certified", "exact", "append a token")
        )
        cells = [f"{keys:,}{', one head' if heads == 1 else ''}"]
        cells += [f"{row['speedup']:.1f} × ({row['ms']:.1f} ms)" for row in certified]
        cells += [", ".join(f"{row['read']:.1%}" for row in certified)]
        cells += [" – ".join(f"{row['speedup']:.1f} ×" for row in exact)]
        cells += [", ".join(f"{a['ms'] / c['ms']:.1%}" for a, c in zip(append, certified, strict=True)) + " of a step"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[Row], path: Path) -> None:
    """Speed-up over SDPA and share of keys read, by the number of keys."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    styles = {"exact": "#0072B2", "certified": "black", "certified, plain attention": "#D55E00"}
    for contestant, colour in styles.items():
        for scores, line in (("gaussian", "o-"), ("mean -1.5", "s--")):
            chosen = [r for r in rows if (r["contestant"], r["scores"], r["heads"]) == (contestant, scores, HEADS)]
            keys = [row["keys"] for row in chosen]
            label = f"{contestant}, {scores}"
            left.plot(keys, [row["speedup"] for row in chosen], line, color=colour, label=label)
            if contestant != "exact":
                right.plot(keys, [100 * row["read"] for row in chosen], line, color=colour, label=label)
    left.axhline(1, color="#999999", linewidth=0.8)
    left.set(xscale="log", xlabel="keys", ylabel="times as fast as SDPA", title="a decoding step")
    right.set(xscale="log", yscale="log", xlabel="keys", ylabel="keys read in full (%)", title="tolerance 1e-3")
    left.legend(fontsize=7)
    right.legend(fontsize=7)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
