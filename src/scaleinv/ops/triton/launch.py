"""From tensors to kernels: what they all take, their grids and their outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from scaleinv.ops.masks import Geometry
from scaleinv.ops.triton import configs
from scaleinv.ops.triton.backward import delta_kernel, key_value_kernel, query_kernel
from scaleinv.ops.triton.decode import MAX_QUERIES, decode_kernel, merge_kernel
from scaleinv.ops.triton.forward import forward_kernel
from scaleinv.ops.triton.segments import Segments, segments
from scaleinv.ops.triton.table_gradients import table_kernel
from scaleinv.ops.triton.tables import LOG2E, PAD, head_stride, pack

FAR = 1 << 30
MAX_STRIDE = 1 << 22
INTERPRETED = isinstance(forward_kernel, InterpretedFunction)
"""Are the kernels run by Triton's interpreter (TRITON_INTERPRET=1 when this module was imported)?"""

if INTERPRETED:
    importlib.import_module("scaleinv.ops.triton.interpreter").mend()


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call, as the kernels take it."""

    query: Tensor  # [B, H, Nq, D]; here and below the last dimension is contiguous
    key: Tensor  # [B, KV, Nk, D]
    value: Tensor  # [B, KV, Nk, DV]
    query_gain: Tensor | None  # c, float32 [B, H, Nq], contiguous
    gain: Tensor | None  # a and m over geometry.table_range(), float32 [H or 1, T] each; None for a = 1, m = 0
    shift: Tensor | None
    segments: Segments | None
    geometry: Geometry  # as `nearby` makes it
    scale: float

    @staticmethod
    def of(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_gain: Tensor | None,
        gain: Tensor | None,
        shift: Tensor | None,
        document_ids: Tensor | None,
        key_mask: Tensor | None,
        scale: float,
        geometry: Geometry,
    ) -> Problem:
        if query_gain is not None:
            query_gain = query_gain.to(torch.float32).expand(query.shape[:3]).contiguous()
        if gain is None and scale <= 0:  # the form without a table multiplies the largest score by the scale
            start, stop = geometry.table_range()
            gain = query.new_ones(1, stop - start, dtype=torch.float32)
            shift = torch.zeros_like(gain)
        if gain is not None and shift is not None:
            gain, shift = rows(gain.to(torch.float32)), rows(shift.to(torch.float32))
        found = segments(document_ids, key_mask, geometry)
        return Problem(rows(query), rows(key), rows(value), query_gain, gain, shift, found, nearby(geometry), scale)

    @functools.cached_property
    def packed(self) -> Tensor | None:
        """The packed table."""
        if self.gain is None or self.shift is None:
            return None
        return pack(self.gain, self.shift, self.geometry, self.scale)

    @property
    def empty(self) -> bool:
        """Does no query see any key?"""
        low, high = self.geometry.key_range()
        return low >= high or not self.query.numel() or not self.value.numel()

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.key.shape[1]

    @property
    def tail(self) -> bool:
        """Do some tiles need an explicit mask?"""
        hidden_by_distance = self.geometry.last - self.geometry.min_distance < self.geometry.keys
        return self.gain is None or not hidden_by_distance

    def config(self, kernel: str) -> configs.Config:
        width = max(_padded(self.query.shape[3]), _padded(self.value.shape[3]))
        return configs.choose(kernel, target(self.query.device), width, self.query.element_size())

    def arguments(self, *, spans: str | None, table: bool = True) -> dict[str, Any]:
        """What every kernel takes, by name; `spans` says which spans of the segments: "key" or "query"."""
        low, high = self.geometry.key_range()
        known = {} if self.segments is None else vars(self.segments)
        geometry = {
            name: getattr(self.geometry, name) for name in ("queries", "keys", "offset", "min_distance", "max_distance")
        }
        dims = {"D": self.query.shape[3], "DV": self.value.shape[3]}
        given = {
            "query": self.query,
            "key": self.key,
            "value": self.value,
            "query_gain": self.query_gain,
            "query_segment": known.get("query"),
            "key_segment": known.get("key"),
            **strides("q", self.query),
            **strides("k", self.key),
            **strides("v", self.value),
            **geometry,
            "heads": self.query.shape[1],
            "low": low,
            "high": high,
            "factor": self.scale * LOG2E,
            "GROUP": self.group,
            **dims,
            **{f"BLOCK_{name}": _padded(size) for name, size in dims.items()},
            "SEGMENTS": 0 if self.segments is None else 1 + self.segments.hides_keys,
            "QUERY_GAIN": self.query_gain is not None,
            "PRECISION": configs.precision(target(self.query.device), self.query.element_size()),
        }
        if spans is not None:
            given |= {f"{end}_{spans}": known.get(f"{end}_{spans}") for end in ("first", "last")}
        if table:
            packed = self.packed
            given |= {
                "table": packed,
                "table_stride": 0 if packed is None else head_stride(packed),
                "GATHER": "load" if INTERPRETED else configs.gather(target(self.query.device)),
                "PAD": PAD,
            }
        return given


def nearby(geometry: Geometry) -> Geometry:
    """The same visibility with distances counted from the first of `Geometry.table_range`: all fit into 32 bits.

    Only where distance 0 is not visible does that change them; then all visible ones have the same sign.
    """
    start, _ = geometry.table_range()
    shift = start if geometry.last > 0 else -start
    return dataclasses.replace(
        geometry,
        offset=geometry.offset - shift,
        min_distance=max(geometry.min_distance - shift, -FAR),
        max_distance=min(geometry.max_distance - shift, FAR),
    )


def forward(problem: Problem, whole: bool) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Nq, DV]``, in float32 if `whole`, and logsumexp ``[B, H, Nq]`` in float32."""
    query, value = problem.query, problem.value
    out = query.new_empty(*query.shape[:3], value.shape[3], dtype=torch.float32 if whole else value.dtype)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    if problem.empty:
        return out.zero_(), lse.fill_(-torch.inf)
    flags = {"TABLE": problem.gain is not None, "WHOLE": whole and value.dtype != torch.float32}
    with _device(query):
        if problem.geometry.queries <= MAX_QUERIES:
            _decode(problem, out, lse, flags)
        else:
            config = problem.config("forward")
            grid = (triton.cdiv(query.shape[2], config.block_m) * query.shape[0] * query.shape[1],)
            given = problem.arguments(spans="key") | _tiles(config)
            forward_kernel[grid](**given, **flags, out=out, lse=lse, TAIL=problem.tail)
    return out, lse


def backward(
    problem: Problem, grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, table_grads: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, their scale c and the two tables; empty where there is no such input."""
    query, key, value = problem.query, problem.key, problem.value
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
    grad_scale, *tables = (query.new_empty(0, dtype=torch.float32) for _ in range(3))
    if problem.query_gain is not None:
        grad_scale = torch.empty_like(problem.query_gain)
    if problem.empty:
        if table_grads and problem.gain is not None and problem.shift is not None:
            tables = [torch.zeros_like(problem.gain), torch.zeros_like(problem.shift)]
        return grads[0].zero_(), grads[1].zero_(), grads[2].zero_(), grad_scale.zero_(), tables[0], tables[1]
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    given = outer(problem, grad_out, lse2, delta)
    with _device(query):
        _delta(given["grad_out"], out, lse, grad_lse.contiguous(), delta, lse2)
    gradients(problem, given, grads, grad_scale)
    if table_grads:
        tables = _table_gradients(problem, given)
    return grads[0], grads[1], grads[2], grad_scale, tables[0], tables[1]


def outer(problem: Problem, grad_out: Tensor, lse2: Tensor, delta: Tensor) -> dict[str, Any]:
    """What the backward kernels take of the whole softmax: gradient, logsumexp in base 2 and delta of each row."""
    grad_out = rows(grad_out.to(problem.query.dtype))
    return {"grad_out": grad_out, **strides("g", grad_out), "lse2": lse2, "delta": delta}


def gradients(problem: Problem, given: dict[str, Any], grads: list[Tensor], grad_scale: Tensor | None) -> None:
    """Fill the gradients of query, key, value and c, each in its own dtype; `given` is what `outer` made."""
    query, key = problem.query, problem.key
    flags = {"TABLE": problem.gain is not None, "unit": problem.scale}
    if problem.gain is not None:
        flags["unit"] = math.log(2)  # the packed a holds the scale and log2(e)
    with _device(query):
        config = problem.config("keys-values")
        grid = (triton.cdiv(key.shape[2], config.block_n) * key.shape[0] * key.shape[1],)
        shared = problem.arguments(spans="query") | given | flags | _tiles(config)
        key_value_kernel[grid](**shared, grad_key=grads[1], grad_value=grads[2])
        config = problem.config("queries")
        grid = (triton.cdiv(query.shape[2], config.block_m) * query.shape[0] * query.shape[1],)
        shared = problem.arguments(spans="key") | given | flags | _tiles(config)
        query_kernel[grid](**shared, grad_query=grads[0], grad_query_gain=grad_scale, TAIL=problem.tail)


def _delta(grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor, delta: Tensor, lse2: Tensor) -> None:
    batch, heads, queries, value_dim = grad_out.shape
    sizes = {"heads": heads, "queries": queries, "DV": value_dim, "BLOCK_DV": _padded(value_dim), "BLOCK_M": 64}
    tensors = {"out": out, "grad_out": grad_out, "lse": lse, "grad_lse": grad_lse, "delta": delta, "lse2": lse2}
    delta_kernel[(triton.cdiv(queries, 64) * batch * heads,)](**tensors, **strides("g", grad_out), **sizes)


def _decode(problem: Problem, out: Tensor, lse: Tensor, flags: dict[str, bool]) -> None:
    batch, _, queries, value_dim = out.shape
    config = problem.config("decode")
    low, high = problem.geometry.key_range()
    group_rows = problem.group * queries
    block_m = min(_padded(group_rows), config.block_m)
    programs = batch * problem.key.shape[1] * triton.cdiv(group_rows, block_m)
    splits, chunk = split(high - low, programs, config.block_n, _processors(problem.query.device))
    part_out = out.new_empty(splits, *out.shape, dtype=torch.float32)
    part_lse = out.new_empty(splits, *lse.shape, dtype=torch.float32)
    a, m = problem.gain, problem.shift
    given = problem.arguments(spans="key", table=False) | _tiles(config) | {"BLOCK_M": block_m}
    tables: dict[str, Any] = {"gain": a, "shift": m}
    tables |= {"gain_stride": 0 if a is None else head_stride(a), "shift_stride": 0 if m is None else head_stride(m)}
    parts = {"part_out": part_out, "part_lse": part_lse}
    decode_kernel[(splits * programs,)](**given, **flags, **tables, **parts, batches=batch, splits=splits, chunk=chunk)
    sizes = {"DV": value_dim, "BLOCK_DV": _padded(value_dim), "SPLITS": triton.next_power_of_2(splits)}
    merge_kernel[(lse.numel(),)](**parts, out=out, lse=lse, rows=lse.numel(), splits=splits, **sizes)


def diagonal_sums(problem: Problem, given: dict[str, Any]) -> Tensor:
    """Sums of ``dL · q·k`` and ``dL`` along the diagonals, ``[H, 2, Nq + Nk - 1]``, from the smallest distance on."""
    geometry, heads = problem.geometry, problem.query.shape[1]
    config = problem.config("tables")
    size = config.block_m
    key_tiles = triton.cdiv(geometry.keys, size)
    diagonals = triton.cdiv(geometry.queries, size) + key_tiles - 1
    sums = problem.query.new_empty(heads, diagonals, 2, 2, size, dtype=torch.float32)
    shared = problem.arguments(spans=None) | given
    launch = {"num_warps": config.warps, "num_stages": config.stages, "SIZE": size}
    with _device(problem.query):
        table_kernel[(heads * diagonals,)](**shared, sums=sums, batches=problem.query.shape[0], **launch)
    # A tile diagonal's negative distances are the previous one's positive ones.
    joined = torch.zeros(heads, diagonals + 1, 2, size, dtype=torch.float32, device=sums.device)
    joined[:, 1:] += sums[:, :, :, 0]
    joined[:, :-1] += sums[:, :, :, 1]
    along = joined.transpose(1, 2).flatten(2)  # [H, 2, distances], from -key_tiles · size on
    start = key_tiles * size - (geometry.keys - 1)
    return along[:, :, start : start + geometry.queries + geometry.keys - 1]


def _table_gradients(problem: Problem, given: dict[str, Any]) -> list[Tensor]:
    assert problem.gain is not None
    assert problem.shift is not None
    geometry, along = problem.geometry, diagonal_sums(problem, given)
    distance = torch.arange(geometry.first, geometry.last + 1, device=along.device)
    keep = geometry.visible(distance)
    index = distance.abs().clamp_max(problem.gain.shape[1] - 1)
    factors = (problem.scale, 1.0)
    results = []
    for which, table in enumerate((problem.gain, problem.shift)):
        summed = along[:, which] * factors[which]
        summed = (summed if table.shape[0] > 1 else summed.sum(0, keepdim=True)).masked_fill(~keep, 0)
        # At most two terms, t and -t, meet in an entry: the order of the sum does not matter.
        results.append(torch.zeros_like(table).index_add_(1, index, summed))
    return results


def split(keys: int, programs: int, block: int, processors: int) -> tuple[int, int]:
    """Into how many parts to split the keys, and how many keys each has: two programs for each processor."""
    keys = max(keys, 1)
    wanted = min(triton.cdiv(2 * processors, programs), triton.cdiv(keys, 2 * block), 64)
    chunk = triton.cdiv(triton.cdiv(keys, wanted), block) * block
    return triton.cdiv(keys, chunk), chunk


def target(device: torch.device) -> str:
    """The GPU's architecture, as `configs` names it; the interpreter runs with the blocks of sm_80."""
    if device.type != "cuda":
        return "sm_80"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def strides(name: str, x: Tensor) -> dict[str, int]:
    """Strides of batch, head and row."""
    return dict(zip((f"{name}_batch", f"{name}_head", f"{name}_row"), x.stride(), strict=False))


def rows(x: Tensor) -> Tensor:
    """x with contiguous rows, so close to each other that kernels can count a tile's elements in 32 bits."""
    contiguous = x.stride(-1) == 1 or x.shape[-1] == 1
    return x if contiguous and x.stride(-2) < MAX_STRIDE else x.contiguous()


def _tiles(config: configs.Config) -> dict[str, int]:
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def _device(x: Tensor) -> contextlib.AbstractContextManager:
    return torch.cuda.device(x.device) if x.device.type == "cuda" else contextlib.nullcontext()
