"""The blocked algorithm as a C kernel (kernel.c): float32 arithmetic on CPU, built on demand by the local compiler.

Without a compiler, `obstacle` says so and the plain twin (blocked.py) runs. The twin also takes over where inputs hold
NaN or infinity, which hidden pairs must not spread.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from scaleinv.ops import blocked, operator
from scaleinv.ops.build import build
from scaleinv.ops.call import Call, DiagonalCall
from scaleinv.ops.masks import query_documents

SOURCE = Path(__file__).with_name("kernel.c")
DECODE_ROWS = 16
"""With at most this many queries per key head, keys are read in place: packing them would cost more."""


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("row", ctypes.c_int64),
    )


class _Call(ctypes.Structure):
    """`Call` of kernel.c, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batches", "heads", "kv_heads", "queries", "keys", "dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("offset", "min_distance", "max_distance", "table_heads", "threads")),
        ("scale", ctypes.c_float),
        ("query", _Matrix),
        ("key", _Matrix),
        ("value", _Matrix),
        ("gain", ctypes.c_void_p),
        ("shift", ctypes.c_void_p),
        ("query_segment", ctypes.c_void_p),
        ("key_segment", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("grad_out", _Matrix),
        ("delta", ctypes.c_void_p),
        ("chunks", ctypes.c_int64),
        ("grad_query", ctypes.c_void_p),
        ("grad_key", ctypes.c_void_p),
        ("grad_value", ctypes.c_void_p),
        ("grad_table", ctypes.c_void_p),
    )


class Kernel:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        built = [ctypes.c_int64() for _ in range(3)]
        self.library.scaleinv_build(*(ctypes.byref(value) for value in built))
        self.tile_rows, self.tile_columns, call_bytes = (value.value for value in built)
        if call_bytes != ctypes.sizeof(_Call):
            raise OSError(f"{path} was built from another version of kernel.c: delete it")

    def run(self, name: str, call: _Call) -> bool:
        """Call one of its functions; False if it met numbers that are not tame (see `scaleinv.ops.hidden`)."""
        code = getattr(self.library, name)(ctypes.byref(call))
        if code == 1:
            raise MemoryError(f"{name} could not allocate its work space")
        return code == 0


@functools.cache
def load() -> Kernel | str:
    """The kernel, built if necessary; or why there is none."""
    return build(SOURCE, Kernel)


def obstacle(call: Call) -> str | None:
    """Why the kernel cannot serve the call; None if it can."""
    if call.device.type != "cpu":
        return f"the C kernel runs on CPU, not on {call.device.type}"
    if call.query.dtype == torch.float64:
        return "the C kernel computes in float32, not in float64"
    return _missing()


@torch.compiler.assume_constant_result
def _missing() -> str | None:
    kernel = load()
    return kernel if isinstance(kernel, str) else None


def forward(call: DiagonalCall) -> tuple[Tensor, Tensor]:
    """As `scaleinv.ops.blocked.forward`."""
    given = _given(call)
    query, value = given.query, given.value
    out = query.new_empty(*query.shape[:3], value.shape[3])
    lse = query.new_empty(query.shape[:3])
    if not call.geometry.keys or not out.numel():
        return out.zero_(), lse.fill_(-torch.inf)
    few = query.shape[1] // given.key.shape[1] * query.shape[2] <= DECODE_ROWS
    segments = _segments(call)
    arguments = _arguments(given, segments, lse)
    arguments.out = out.data_ptr()
    if not _kernel().run("scaleinv_decode" if few else "scaleinv_forward", arguments):
        return blocked.forward(call)
    return out, lse


def backward(call: DiagonalCall, grad_out: Tensor, lse: Tensor, delta: Tensor, table_grads: bool) -> operator.Gradients:
    """As `scaleinv.ops.blocked.backward`."""
    kernel, given = _kernel(), _given(call)
    batches, heads, queries, dim = given.query.shape
    # Each part of the keys has its own grad_query: split only as far as the threads need, and never by timing, so that
    # the result is the same in every run.
    pairs, threads = batches * given.key.shape[1], torch.get_num_threads()
    chunks = max(1, min(-(-2 * threads // max(pairs, 1)), 8)) if pairs % threads else 1
    zeros = given.query.new_zeros
    grad_query = zeros(chunks, batches, heads, _up(queries, kernel.tile_rows), _up(dim, kernel.tile_columns))
    grad_key, grad_value = zeros(given.key.shape), zeros(given.value.shape)
    grad_table = zeros(chunks, batches, heads, 2, call.gain.shape[1]) if table_grads else None
    if call.geometry.keys and grad_query.numel():
        grad_out, lse, delta = _float(grad_out), _float(lse).contiguous(), _float(delta).contiguous()
        segments = _segments(call)
        arguments = _arguments(given, segments, lse)
        arguments.grad_out, arguments.delta, arguments.chunks = _matrix(grad_out), delta.data_ptr(), chunks
        arguments.grad_query = grad_query.data_ptr()
        arguments.grad_key, arguments.grad_value = grad_key.data_ptr(), grad_value.data_ptr()
        arguments.grad_table = grad_table.data_ptr() if grad_table is not None else None
        if not kernel.run("scaleinv_backward", arguments):
            return blocked.backward(call, grad_out, lse, delta, table_grads)
    grad_query = (grad_query.sum(0) if chunks > 1 else grad_query[0])[:, :, :queries, :dim]
    diagonals = None if grad_table is None else grad_table.sum((0, 1)).transpose(0, 1)  # [2, H, Nq + Nk - 1]
    return operator.Gradients(
        grad_query.contiguous(),
        grad_key,
        grad_value,
        *operator.table_gradients(call, diagonals),
    )


run = operator.engine("blocked-native", forward, backward)


def _kernel() -> Kernel:
    kernel = load()
    if isinstance(kernel, str):
        raise RuntimeError(kernel)
    return kernel


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


def _float(x: Tensor) -> Tensor:
    x = x if x.dtype == torch.float32 else x.to(torch.float32)  # in a decoding step every call counts
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _matrix(x: Tensor) -> _Matrix:
    return _Matrix(x.data_ptr(), *x.stride()[:3])


def _given(call: DiagonalCall) -> DiagonalCall:
    """The call in float32, with contiguous channels. It owns the memory that the kernel reads, so keep it alive."""
    return DiagonalCall(
        _float(call.query),
        _float(call.key),
        _float(call.value),
        _float(call.gain),
        _float(call.shift),
        call.document_ids,
        call.key_mask,
        call.scale,
        call.geometry,
    )


def _arguments(call: DiagonalCall, segments: tuple[Tensor, Tensor] | None, lse: Tensor) -> _Call:
    geometry = call.geometry
    return _Call(
        batches=call.query.shape[0],
        heads=call.query.shape[1],
        kv_heads=call.key.shape[1],
        queries=geometry.queries,
        keys=geometry.keys,
        dim=call.query.shape[3],
        value_dim=call.value.shape[3],
        offset=geometry.offset,
        min_distance=geometry.min_distance,
        max_distance=geometry.max_distance,
        table_heads=call.gain.shape[0],
        threads=torch.get_num_threads(),
        scale=call.scale,
        query=_matrix(call.query),
        key=_matrix(call.key),
        value=_matrix(call.value),
        gain=call.gain.data_ptr(),
        shift=call.shift.data_ptr(),
        query_segment=segments[0].data_ptr() if segments else None,
        key_segment=segments[1].data_ptr() if segments else None,
        lse=lse.data_ptr(),
    )


def _segments(call: DiagonalCall) -> tuple[Tensor, Tensor] | None:
    """Documents of queries and keys as small non-negative int32, -1 for a key that is masked or that no query sees."""
    geometry, key_mask = call.geometry, call.key_mask
    if call.document_ids is not None:
        queries, keys = _numbered(call)
    elif key_mask is not None:
        keys = key_mask.new_zeros(key_mask.shape, dtype=torch.int32)
        queries = keys.new_zeros(keys.shape[0], geometry.queries)
    else:
        return None
    if key_mask is not None:
        keys = keys.masked_fill(~key_mask, -1)
    low, high = geometry.key_range()
    if low > 0 or high < geometry.keys:
        keys = F.pad(keys[:, low:high], (low, geometry.keys - high), value=-1)
    return queries.to(torch.int32).contiguous(), keys.to(torch.int32).contiguous()


def _numbered(call: DiagonalCall) -> tuple[Tensor, Tensor]:
    """Documents of queries and keys, numbered from 0."""
    assert call.document_ids is not None
    if call.query_ids is None:
        keys = torch.unique(call.document_ids, return_inverse=True)[1]
        return query_documents(keys, call.geometry.offset, call.geometry.queries), keys
    both = torch.unique(torch.cat([call.query_ids, call.document_ids], 1), return_inverse=True)[1]
    queries, keys = both.split([call.geometry.queries, call.geometry.keys], dim=1)
    return queries, keys
