"""What works on this machine: for each backend, can it serve, is it right, how fast is it; and what `auto` takes."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from scaleinv.machine import cpu_name
from scaleinv.ops import agreement, native, registry
from scaleinv.ops.call import Call
from scaleinv.progress import Progress, silent
from scaleinv.version import VERSION

HEAD_DIM = 64
OTHER_HEAD_DIMS = (128, 256)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of one operation, on a backend and with `scaled_dot_product_attention`."""

    what: str  # forward, backward or decoding
    keys: int
    milliseconds: float
    sdpa: float


@dataclasses.dataclass
class Examined:
    """What is known of one backend."""

    name: str
    obstacle: str | None  # why it cannot serve a training call here
    errors: dict[str, agreement.Comparison] = dataclasses.field(default_factory=dict)  # dtype: the worst one
    wrong: list[str] = dataclasses.field(default_factory=list)
    timings: list[Timing] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Report:
    """The whole answer. `wrong` is empty where all is well."""

    machine: dict[str, str]
    backends: list[Examined]
    auto: dict[str, str]  # dtype: what `auto` takes, and why not what stands before it
    wrong: list[str]

    def as_json(self) -> dict[str, Any]:
        """As JSON takes it: an infinity or NaN is None."""
        return json.loads(json.dumps(dataclasses.asdict(self)), parse_constant=lambda name: None)

    def lines(self) -> list[str]:
        """The report as text, made to be pasted into an issue."""
        found = [f"{name:10} {value}" for name, value in self.machine.items()]
        for backend in self.backends:
            found += ["", *_backend_lines(backend)]
        found += ["", *(f"auto, {dtype}: {text}" for dtype, text in self.auto.items())]
        return [*found, "", *(f"WRONG: {text}" for text in self.wrong)] if self.wrong else [*found, "", "All is well."]


def examine(device: torch.device, quick: bool = False, progress: Progress = silent) -> Report:
    """Examine every backend on a device. Quick leaves out the longer timings and all head dimensions but 64."""
    dtypes = [torch.float32, torch.bfloat16] + ([torch.float16] if device.type == "cuda" else [])
    backends = []
    for entry in registry.BACKENDS:
        progress(f"examining {entry.name}")
        backends.append(_examined(entry, device, dtypes, quick))
    wrong = [f"{backend.name}: {text}" for backend in backends for text in backend.wrong]
    auto = {}
    for dtype in dtypes:
        try:
            auto[_short(dtype)] = _choice(device, dtype)
        except ValueError as error:
            wrong.append(str(error))
    return Report(machine(device), backends, auto, wrong)


def machine(device: torch.device) -> dict[str, str]:
    """Versions, processors, memory and the C compiler."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    known = agreement.machine(native, device)
    found = {
        "scaleinv": VERSION,
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, CUDA {known['cuda']}, triton {known['triton']}",
        "cpu": f"{cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "memory": f"{pages / 2**30:.0f} GiB",
        "compiler": _compiler(),
    }
    if importlib.util.find_spec("transformers"):
        found["hf"] = f"transformers {metadata.version('transformers')}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = f"compute capability {properties.major}.{properties.minor}"
        found["gpu"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {capability}"
        found["driver"] = known["driver"]
    return found


def _examined(entry: registry.Backend, device: torch.device, dtypes: list[torch.dtype], quick: bool) -> Examined:
    examined = Examined(entry.name, entry.module.obstacle(_sample(device, torch.float32)))
    if examined.obstacle is not None:
        return examined
    for dtype in dtypes:
        if entry.module.obstacle(_sample(device, dtype)) is not None:
            continue
        for head_dim in (HEAD_DIM,) if quick else (HEAD_DIM, *OTHER_HEAD_DIMS):
            for sample in agreement.SAMPLES:
                where = f"{sample.name}, {_short(dtype)}, head dim {head_dim}"
                try:
                    for found in agreement.comparison(entry.module, sample, device, dtype, head_dim):
                        worst = examined.errors.setdefault(_short(dtype), found)
                        if found.error / found.limit > worst.error / worst.limit:
                            examined.errors[_short(dtype)] = found
                        if not found.error <= found.limit:
                            text = f"{found.name} off by {found.error:.2g}, {found.limit:.2g} allowed"
                            examined.wrong.append(f"{where}: {text}")
                except Exception as error:  # a compiler or a driver that fails is an answer too
                    examined.wrong.append(f"{where}: {type(error).__name__}: {error}")
    if entry.name != "reference" and not examined.wrong:
        examined.timings = _timings(entry, device, quick)
    return examined


def _timings(entry: registry.Backend, device: torch.device, quick: bool) -> list[Timing]:
    if entry.name == "triton" and device.type == "cpu":
        return []  # the interpreter's speed says nothing
    cuda = device.type == "cuda"
    dtype, heads = (torch.bfloat16, 16) if cuda else (torch.float32, 4)
    sizes = ([1024, 4096] if quick else [1024, 4096, 16384]) if cuda else ([512] if quick else [512, 2048])
    found = []
    for keys in sizes:
        query, key, value = (torch.randn(1, heads, keys, HEAD_DIM, device=device, dtype=dtype) for _ in range(3))
        for what, rows in (("forward", keys), ("backward", keys), ("decoding", 1)):
            leaves = [x.detach().requires_grad_(what == "backward") for x in (query[:, :, -rows:], key, value)]
            call = agreement.plain_call(*leaves)
            if entry.module.obstacle(call) is None:
                runs = (functools.partial(_run, entry, call), functools.partial(_sdpa, *leaves))
                found.append(Timing(what, keys, *_milliseconds(runs, leaves, device)))
    return found


def _run(entry: registry.Backend, call: Call) -> Tensor:
    return entry.module.run(call)[0]


def _sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=query.shape[2] > 1)


def _milliseconds(runs: Sequence[Callable[[], Tensor]], leaves: list[Tensor], device: torch.device) -> list[float]:
    """Of each: the median of a few runs in turn, after one that does not count; with gradients, the backward alone."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(6):
        for run, own in zip(runs, times, strict=True):
            out = run() if leaves[0].requires_grad else None
            _finish(device)
            start = time.perf_counter()
            if out is None:
                run()
            else:
                torch.autograd.grad(out, leaves, torch.ones_like(out))
            _finish(device)
            own.append(1000 * (time.perf_counter() - start))
    return [statistics.median(own[1:]) for own in times]


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _choice(device: torch.device, dtype: torch.dtype) -> str:
    call = _sample(device, dtype)
    chosen = registry.choose("auto", call)
    before = []
    for entry in registry.BACKENDS[: registry.BACKENDS.index(chosen)]:
        if not entry.answers_to("auto", device.type):
            before.append(f"{entry.name} is not for {device.type}")
        else:
            reason = entry.module.obstacle(call) or (agreement.doubt(entry.module, call) if entry.proven else None)
            before.append(f"{entry.name}: {reason}")
    return chosen.name + (f" ({'; '.join(before)})" if before else "")


def _sample(device: torch.device, dtype: torch.dtype) -> Call:
    return agreement.SAMPLES[0].call(device, dtype, HEAD_DIM)[0]


def _compiler() -> str:
    kernel = native.load()
    command = next(
        (name for name in (os.environ.get("CC", ""), "cc", "gcc", "clang") if name and shutil.which(name)), None
    )
    if isinstance(kernel, str) or command is None:
        return f"none: {kernel}"
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=False).stdout
    return f"{version.partition(chr(10))[0]}; the C kernel is built"


def _backend_lines(backend: Examined) -> list[str]:
    if backend.obstacle is not None:
        return [f"{backend.name}: cannot serve: {backend.obstacle}"]
    found = [f"{backend.name}: " + ("wrong" if backend.wrong else "agrees with the reference")]
    for dtype, worst in backend.errors.items():
        own, limit = f"the reference's own error is {worst.same_precision:.1e}", f"{worst.limit:.1e} is allowed"
        found.append(f"  {dtype:10}{worst.name} off by {worst.error:.1e}; {own}, {limit}")
    found += [f"  {text}" for text in backend.wrong]
    for t in backend.timings:
        found.append(f"  {t.what:10}{t.keys:7} keys {t.milliseconds:9.2f} ms, {t.milliseconds / t.sdpa:5.2f} × SDPA")
    return found


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def ahead_of_time(targets: list[str]) -> Iterator[dict[str, Any]]:
    """Every shipped configuration of the Triton kernels for these targets: what it compiled to, and its faults."""
    if importlib.util.find_spec("triton") is None:
        raise ImportError('compiling ahead of time needs triton: pip install "scaleinv[triton]"')
    from scaleinv.ops.triton import aot, configs, interpreted

    for target in targets:
        if target not in configs.TARGETS:
            raise ValueError(f"--aot takes {', '.join(configs.TARGETS)}, got {target!r}")
    if interpreted():
        raise ValueError("--aot compiles the kernels, but with TRITON_INTERPRET they are interpreted: unset it")
    for kernel, target, head_dim, item_bytes in configs.shipped():
        if target in targets:
            build = aot.compiled(kernel, target, head_dim, item_bytes)
            c = build.config
            loop = ", ".join(f"{name} {n}" for name, n in sorted(build.loop.items(), key=lambda pair: -pair[1])[:8])
            line = (
                f"{target} {kernel:12}D {head_dim:3} {8 * item_bytes:2} bit  tile {c.block_m} × {c.block_n}, {c.warps} "
                f"warps, {c.stages} stages: {build.registers} registers, {build.spilled} bytes spilled, "
                f"{build.shared / 1024:.0f} KB shared; loop: {loop}"
            )
            yield dataclasses.asdict(build) | {"faults": aot.faults(build), "line": line}
