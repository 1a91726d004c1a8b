"""Compiling the kernels for GPUs that are not here: registers, spills, shared memory and the main loop's instructions.

`compiled` needs neither a GPU nor a driver: Triton's wheel brings the assemblers and NVIDIA's disassembler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from scaleinv import files
from scaleinv.machine import cache_folder
from scaleinv.ops.triton import configs
from scaleinv.ops.triton.backward import delta_kernel, key_value_kernel, query_kernel
from scaleinv.ops.triton.decode import decode_kernel, merge_kernel
from scaleinv.ops.triton.forward import forward_kernel
from scaleinv.ops.triton.table_gradients import table_kernel
from scaleinv.ops.triton.tables import BLOCK, PAD, pack_kernel

SHARED_MEMORY = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_120": 99 << 10, "gfx942": 64 << 10}
"""Bytes of shared memory that one program may have."""

MODES = ("table", "plain", "everything", "logn")
"""What is compiled in: causal self-attention with a table or without one; and every option at once, with a table or
without, so that each path has been through the compiler."""

FUNCTIONS: dict[str, Any] = {
    "forward": forward_kernel,
    "keys-values": key_value_kernel,
    "queries": query_kernel,
    "tables": table_kernel,
    "decode": decode_kernel,
}
HELPERS: dict[str, Any] = {"pack": pack_kernel, "delta": delta_kernel, "merge": merge_kernel}
"""Kernels without a main loop: they only have to compile."""

_WIDE = ("query", "key", "value", "grad_out", "out", "grad_key", "grad_value", "grad_query")
_FLOATS = (
    "packed",
    "grad_lse",
    "query_gain",
    "grad_query_gain",
    "lse",
    "lse2",
    "delta",
    "sums",
    "part_out",
    "part_lse",
    "gain",
    "shift",
)
_INTEGERS = ("query_segment", "key_segment", "first_key", "last_key", "first_query", "last_query")
_OPTIONAL = ("query_gain", "grad_query_gain", *_INTEGERS)
_STRIDES: tuple[str, ...] = tuple(f"{x}_{y}" for x in "qkvg" for y in ("batch", "head", "row"))
_STRIDES += ("table_stride", "gain_stride", "shift_stride")


_NVIDIA = (r"Used (\d+) registers", r"(\d+) bytes spill stores")
_AMD = (r"\.vgpr_count:\s+(\d+)", r"\.private_segment_fixed_size:\s+(\d+)")
"""Where an assembler's report holds registers and spilled bytes."""

_INSTRUCTION = r"""(?x)  # name and operands
    (?:/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?|^\t(?=[sv]_|ds_|buffer_|global_|scratch_))
    ([A-Z][A-Z0-9_]*(?:\.[A-Z0-9_.]+)?|[a-z]\w+)(.*)
"""


@dataclasses.dataclass(frozen=True)
class Build:
    """What one configuration compiled to."""

    kernel: str
    target: str
    head_dim: int
    item_bytes: int
    mode: str
    config: configs.Config
    registers: int
    spilled: int  # bytes stored to local memory, for each thread
    shared: int  # bytes
    loop: dict[str, int]  # instructions of the main loop, for each warp and tile

    @property
    def tensor_cores(self) -> int:
        """Tensor-core instructions in the main loop."""
        return _tensor_cores(self.loop)


def compiled(
    kernel: str,
    target: str,
    head_dim: int,
    item_bytes: int = 2,
    mode: str = "table",
    config: configs.Config | None = None,
) -> Build:
    """Compiles one configuration, or finds it in the cache folder."""
    if config is None:
        config = configs.choose("forward" if kernel in HELPERS else kernel, target, head_dim, item_bytes)
    wanted = (kernel, target, head_dim, item_bytes, mode, dataclasses.astuple(config))
    name = hashlib.sha256(f"{sources()} {triton.__version__} {wanted}".encode()).hexdigest()[:24]
    with contextlib.suppress(OSError, RuntimeError, files.UnreadableFile, TypeError, KeyError):
        found = files.read_object(cache_folder() / "aot" / f"{name}.json")
        return Build(**(found | {"config": configs.Config(**found["config"])}))
    build = _compile(kernel, target, head_dim, item_bytes, mode, config)
    with contextlib.suppress(OSError, RuntimeError):  # a folder that cannot be written, a user without a home
        files.write_json(cache_folder() / "aot" / f"{name}.json", dataclasses.asdict(build))
    return build


def faults(build: Build) -> list[str]:
    """What keeps a configuration from being shipped: memory that its target lacks, spills, no tensor cores."""
    found = []
    if build.shared > SHARED_MEMORY[build.target]:
        found.append(f"{build.shared} bytes of shared memory, {SHARED_MEMORY[build.target]} are there")
    if not build.tensor_cores:
        found.append("no tensor-core instructions")
    if build.kernel == "forward" and build.mode in ("table", "plain") and build.spilled > 64:
        found.append(f"{build.spilled} bytes spilled, 64 allowed")
    if build.kernel == "keys-values" and build.spilled and build.mode == "table":
        plain = compiled(build.kernel, build.target, build.head_dim, build.item_bytes, "plain", build.config)
        if build.spilled > 2 * plain.spilled:
            found.append(f"{build.spilled} bytes spilled, twice {plain.spilled} of the plain mode allowed")
    return found


@functools.cache
def sources() -> str:
    """A digest of the kernels' source."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem in ("aot", "backward", "decode", "forward", "table_gradients", "tables", "tiles"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _compile(kernel: str, target: str, head_dim: int, item_bytes: int, mode: str, config: configs.Config) -> Build:
    function = (FUNCTIONS | HELPERS)[kernel]
    element = "bf16" if item_bytes == 2 else "fp32"
    table, options = mode in ("table", "everything"), mode in ("everything", "logn")
    width = head_dim - 8 if options else head_dim
    constants: dict[str, Any] = {
        "GROUP": 2 if options else 1, "D": width, "DV": width, "BLOCK_D": head_dim, "BLOCK_DV": head_dim,
        "TABLE": table, "SEGMENTS": 2 if options else 0, "QUERY_GAIN": options, "WHOLE": options and item_bytes == 2,
        "TAIL": options or not table,
        "GATHER": configs.gather(target), "PRECISION": configs.precision(target, item_bytes),
        "PAD": PAD, "BLOCK": BLOCK, "SPLITS": 32, "SIZE": config.block_m,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
    }  # fmt: skip
    absent = {
        *(() if options else _OPTIONAL),
        *(() if table or kernel in ("tables", "pack") else ("table", "gain", "shift")),
    }
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(function.arg_names):
        if name in constants or name in absent:
            signature[name], constexprs[name] = "constexpr", constants.get(name)
            continue
        kind = "i32"
        if name in _WIDE:
            kind = f"*{element}"
        elif name in _FLOATS:
            kind = "*fp32"
        elif name == "table":
            kind = "*i64"
        elif name in _INTEGERS:
            kind = "*i32"
        elif name in _STRIDES:
            kind = "i64"
        elif name in ("factor", "unit"):
            kind = "fp32"
        signature[name] = kind
        if kind.startswith(("*", "i64")) or name in ("queries", "keys", "chunk", "low", "high"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constexprs, attributes)
    amd = target.startswith("gfx")
    gpu = GPUTarget("hip", target, 64) if amd else GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    log = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        made = triton.compile(source, gpu, {"num_warps": config.warps, "num_stages": config.stages})
    text = made.asm["amdgcn"] if amd else log.getvalue()
    registers, spilled = (int(re.findall(pattern, text)[-1]) for pattern in (_AMD if amd else _NVIDIA))
    loop = main_loop(text if amd else disassembled(made.asm["cubin"]))
    return Build(
        kernel, target, head_dim, item_bytes, mode, config, registers, spilled, made.metadata.shared, dict(loop)
    )  # fmt: skip


def disassembled(cubin: bytes) -> str:
    """The machine code as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main_loop(code: str) -> Counter[str]:
    """Instructions of the innermost loop that uses tensor cores, by name without modifiers."""
    labels: dict[str, int] = {}
    names: list[str] = []
    loops: list[tuple[int, int]] = []
    for line in code.splitlines():
        label = re.match(r"^(\.L\w+):", line.strip())
        if label:
            labels[label[1]] = len(names)
            continue
        found = re.search(_INSTRUCTION, line)
        if not found:
            continue
        names.append(found[1])
        jump = re.search(r"\.L\w+", found[2])
        if found[1].startswith(("BRA", "s_branch", "s_cbranch")) and jump and jump[0] in labels:
            loops.append((labels[jump[0]], len(names)))
    bodies = [Counter(_short(name) for name in names[start:stop]) for start, stop in loops]
    return min(filter(_tensor_cores, bodies), key=lambda body: sum(body.values()), default=Counter())


def _tensor_cores(loop: Mapping[str, int]) -> int:
    return sum(count for name, count in loop.items() if "MMA" in name or "mfma" in name)


def _short(name: str) -> str:
    first, *rest = name.split(".")
    if first == "MUFU" and rest:
        return f"MUFU.{rest[0]}"
    if first in ("LDG", "LDS", "STS") and any(x in ("64", "128") for x in rest):
        return f"{first}.{next(x for x in rest if x in ('64', '128'))}"
    return first
