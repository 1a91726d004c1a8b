"""A model of what the Triton kernels cost on A100 and H100, from their compiled code. Modelled, not measured.

    python benchmarks/gpu_model.py

For each kernel it counts the instructions of one tile of the main loop, turns them into cycles of each unit of a
processor (tensor cores, special functions, float32, integers, loads, issue), and compares the kernel with its own plain
mode, which computes ordinary attention. Two bounds: `overlapped`, where all units work at once and the busiest one
counts, and `serial`, where the tensor cores wait for the rest.
"""

from __future__ import annotations

import dataclasses

from scaleinv.ops.triton import aot

HEAD_DIM, LAYERS, HEADS, PARAMETERS, TOKENS = 128, 12, 6, 162e6, 524_288  # the 162m model and its step


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Rates of one streaming multiprocessor, for each cycle."""

    name: str
    target: str
    processors: int
    gigahertz: float
    tensor: int  # bfloat16 multiply-adds
    float32: int  # lanes
    special: int = 16  # lanes
    integer: int = 64  # lanes
    bytes_loaded: int = 128  # from L1 or shared memory
    issued: int = 4  # instructions


A100 = Gpu("A100", "sm_80", 108, 1.41, 1024, 64)
H100 = Gpu("H100", "sm_90", 132, 1.83, 2048, 128)

PRODUCTS = {"forward": 2, "keys-values": 4, "queries": 3}
"""Products of a tile, each block_m × block_n × head dim."""

FLOAT32 = ("FADD", "FMUL", "FFMA", "FFMA2")
BYTES = {
    "LDG.64": 256,
    "LDG.128": 512,
    "LDG": 128,
    "LDSM": 512,
    "LDGSTS": 512,
    "LDS": 128,
    "LDS.64": 256,
    "LDS.128": 512,
}
TENSOR = ("HMMA", "HGMMA", "WARPGROUP", "WARPSYNC")


def cycles(build: aot.Build, gpu: Gpu) -> dict[str, float]:
    """Cycles that each unit of a processor is busy with one tile."""
    c = build.config
    lanes = 32 * c.warps
    loop = build.loop
    special = sum(n for name, n in loop.items() if name.startswith("MUFU"))
    float32 = sum(loop.get(name, 0) for name in FLOAT32)
    loads = sum(n * BYTES.get(name, 0) for name, n in loop.items())
    rest = sum(loop.values()) - special - float32 - sum(loop.get(name, 0) for name in (*TENSOR, *BYTES))
    return {
        "tensor": PRODUCTS[build.kernel] * c.block_m * c.block_n * HEAD_DIM / gpu.tensor,
        "special": special * lanes / gpu.special,
        "float32": float32 * lanes / gpu.float32,
        "integer": rest * lanes / gpu.integer,
        "loads": loads * c.warps / gpu.bytes_loaded,
        "issue": sum(loop.values()) * c.warps / gpu.issued,
    }


def overlapped(busy: dict[str, float]) -> float:
    """All units at once: the busiest one."""
    return max(busy.values())


def serial(busy: dict[str, float]) -> float:
    """The tensor cores wait for the busiest of the others."""
    return busy["tensor"] + max(n for name, n in busy.items() if name != "tensor")


def main() -> None:
    print("Modelled, not measured. bfloat16, head dim 128; cycles of one multiprocessor for a tile of 1,000 pairs.\n")
    print("| GPU | kernel | mode | tensor | special | float32 | integer | loads | issue | overlapped | serial |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    pairs: dict[tuple[str, str, bool], dict[str, float]] = {}
    for gpu in (A100, H100):
        for kernel in PRODUCTS:
            for plain in (True, False):
                build = aot.compiled(kernel, gpu.target, HEAD_DIM, 2, "plain" if plain else "table")
                size = build.config.block_m * build.config.block_n / 1000
                busy = {name: n / size for name, n in cycles(build, gpu).items()}
                pairs[gpu.name, kernel, plain] = busy
                shown = " | ".join(f"{n:.0f}" for n in (*busy.values(), overlapped(busy), serial(busy)))
                print(f"| {gpu.name} | {kernel} | {'plain' if plain else 'table'} | {shown} |")
    print("\nCost against the kernel's own plain mode, overlapped – serial:\n")
    for gpu in (A100, H100):
        for kernel in (*PRODUCTS, "all"):
            kernels = tuple(PRODUCTS) if kernel == "all" else (kernel,)
            ratios = [
                total(pairs, gpu, kernels, False, bound) / total(pairs, gpu, kernels, True, bound) for bound in BOUNDS
            ]
            print(f"- {gpu.name}, {kernel}: {ratios[0]:.2f} – {ratios[1]:.2f}")
    print(
        f"\nThe whole training step of the 162m model ({TOKENS:,} tokens; the rest of the model at half of the peak):\n"
    )
    print("| GPU | context | plain, s | ours, s | ratio, overlapped | ratio, serial |")
    print("| --- | --- | --- | --- | --- | --- |")
    for gpu in (A100, H100):
        for length in (4096, 16384, 65536):
            times = [[step_seconds(pairs, gpu, length, plain, bound) for bound in BOUNDS] for plain in (True, False)]
            ratios = [ours / plain for plain, ours in zip(*times, strict=True)]
            seconds = [f"{low:.2f} – {high:.2f}" for low, high in times]
            print(f"| {gpu.name} | {length:,} | {seconds[0]} | {seconds[1]} | {ratios[0]:.2f} | {ratios[1]:.2f} |")
    print("\nThe paper's runs, with FlexAttention on A100, took 2 times as long as plain attention.")


BOUNDS = (overlapped, serial)


def total(pairs: dict, gpu: Gpu, kernels: tuple[str, ...], plain: bool, bound) -> float:
    return sum(bound(pairs[gpu.name, kernel, plain]) for kernel in kernels)


def step_seconds(pairs: dict, gpu: Gpu, length: int, plain: bool, bound) -> float:
    """One optimiser step: attention by the model above, all else as 6 FLOP for each parameter and token."""
    scores = LAYERS * HEADS * TOKENS * length / 2
    attention = (
        scores / 1000 * total(pairs, gpu, tuple(PRODUCTS), plain, bound) / (gpu.processors * gpu.gigahertz * 1e9)
    )
    peak = 2 * gpu.tensor * gpu.processors * gpu.gigahertz * 1e9
    return attention + 6 * PARAMETERS * TOKENS / (0.5 * peak)


if __name__ == "__main__":
    main()
