"""The C kernel of certified decoding (kernel.c): float32 on CPU, built on demand like the attention kernel."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from scaleinv.ops.build import build
from scaleinv.ops.certified.pages import PAGE, Page

SOURCE = Path(__file__).with_name("kernel.c")
MAX_DIM = 1024
"""Channels of a key up to which the kernel's integer sums are exact in float32."""


class _Page(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("key", "value", "code", "step", "residual", "centre", "radius", "longest")
    )


class _Append(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batches", "kv_heads", "dim", "value_dim", "count", "threads")),
        ("key_strides", ctypes.c_int64 * 3),
        ("value_strides", ctypes.c_int64 * 3),
        ("pages", ctypes.c_void_p),
    )


class _Attend(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batches", "heads", "kv_heads", "queries", "keys", "dim", "value_dim")),
        *(
            (name, ctypes.c_int64)
            for name in ("window", "table_heads", "table_length", "table_row", "holes", "threads")
        ),
        ("tolerance", ctypes.c_double),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("query", "query_gain", "gain", "shift", "visible")),
        *((name, ctypes.c_void_p) for name in ("pages", "wait", "out", "mass", "error", "read")),
    )


class Kernel:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        built = [ctypes.c_int64() for _ in range(3)]
        self.library.scaleinv_certified_build(*(ctypes.byref(value) for value in built))
        if [value.value for value in built] != [PAGE, ctypes.sizeof(_Append), ctypes.sizeof(_Attend)]:
            raise OSError(f"{path} was built from another version of kernel.c: delete it")
        self.append, self.attend = self.library.scaleinv_append, self.library.scaleinv_attend
        self.append.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
        self.attend.argtypes = (ctypes.c_void_p,)


@functools.cache
def load() -> Kernel | str:
    """The kernel, built if need be; or why there is none."""
    return build(SOURCE, Kernel)


def obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the kernel cannot serve such a cache; None if it can."""
    if device.type != "cpu":
        return f"the C kernel runs on CPU, not on {device.type}"
    if dtype != torch.float32:
        return f"the C kernel computes in float32, not in {str(dtype).removeprefix('torch.')}"
    if head_dim > MAX_DIM:
        return f"the C kernel takes up to {MAX_DIM} channels, got {head_dim}"
    kernel = load()
    return kernel if isinstance(kernel, str) else None


class PageList:
    """The addresses of pages, as the kernel reads them, and what it must know to append to them."""

    def __init__(self) -> None:
        self.entries = (_Page * 0)()
        self.count = 0
        self.call = _Append()
        self.where = ctypes.addressof(self.call)
        self.append: Callable[..., int]  # set by `expect`

    def add(self, page: Page) -> None:
        if self.count == len(self.entries):
            grown = (_Page * max(8, 2 * self.count))()
            ctypes.memmove(grown, self.entries, ctypes.sizeof(self.entries))
            self.entries = grown
        tensors = (page.key, page.value, page.code, page.step, page.residual, page.centre, page.radius, page.longest)
        self.entries[self.count] = _Page(*(x.data_ptr() for x in tensors))
        self.count += 1
        self.call.pages = self.address

    @property
    def address(self) -> int:
        return ctypes.addressof(self.entries)

    def expect(self, key: Tensor, value: Tensor) -> None:
        """Prepare for keys and values of these shapes and strides."""
        call = self.call
        call.batches, call.kv_heads, call.count, call.dim = key.shape
        call.value_dim, call.threads = value.shape[3], torch.get_num_threads()
        call.key_strides[:], call.value_strides[:] = key.stride()[:3], value.stride()[:3]
        self.append = _kernel().append


def attend(
    pages: PageList,
    keys: int,
    kv_heads: int,
    query: Tensor,  # [B, H, Nq, D]
    query_gain: Tensor | None,  # float64 [B, H, Nq]
    tables: tuple[Tensor, Tensor],  # [heads or 1, T + BLOCK]: distances T - 1 … 0
    table_length: int,
    holes: bool,  # whether a shift is -inf
    visible: Tensor | None,  # bool [B, keys]
    window: int,
    scale: float,
    tolerance: float,
    wait: Tensor,  # int32 [B, H, 2]
    value_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, mass, error and share read."""
    batch, heads, queries, dim = query.shape
    query = query.contiguous()
    query_gain = query_gain.contiguous() if query_gain is not None else None
    visible = visible.contiguous() if visible is not None else None
    out = query.new_empty(batch, heads, queries, value_dim)
    mass, error, read = (query.new_empty(batch, heads, queries, dtype=torch.float64) for _ in range(3))
    call = _Attend(
        batch,
        heads,
        kv_heads,
        queries,
        keys,
        dim,
        value_dim,
        window,
        tables[0].shape[0],
        table_length,
        tables[0].stride(0),
        holes,
        torch.get_num_threads(),
        tolerance,
        scale,
        query.data_ptr(),
        query_gain.data_ptr() if query_gain is not None else None,
        tables[0].data_ptr(),
        tables[1].data_ptr(),
        visible.data_ptr() if visible is not None else None,
        pages.address,
        wait.data_ptr(),
        out.data_ptr(),
        mass.data_ptr(),
        error.data_ptr(),
        read.data_ptr(),
    )
    if _kernel().attend(ctypes.addressof(call)):
        raise MemoryError("certified decoding could not allocate its work space")
    return out, mass, error, read


def _kernel() -> Kernel:
    kernel = load()
    if isinstance(kernel, str):
        raise RuntimeError(kernel)
    return kernel
