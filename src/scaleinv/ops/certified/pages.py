"""The cache's storage: pages of keys and values, each beside an 8-bit copy of its keys and a ball around its values."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import mmap

import torch
from torch import Tensor

PAGE = 1024
"""Keys in a page."""
BLOCK = 16
"""Keys whose 8-bit copies are interleaved, four channels at a time: one vector of the kernel."""
LEVELS = 127
HUGE = 1 << 21
FLUSHED = 1e-36
"""More than the norm of float32 channels that are subnormal: a CPU that flushes them takes them for 0."""


@dataclasses.dataclass
class Page:
    """Room for `PAGE` keys of every head."""

    key: Tensor  # [B, KV, PAGE, D]
    value: Tensor  # [B, KV, PAGE, Dv]
    code: Tensor  # uint8 [B, KV, PAGE / BLOCK, D up to 4 / 4, BLOCK, 4]: 128 + key / step, rounded
    step: Tensor  # [B, KV, PAGE]
    residual: Tensor  # [B, KV, PAGE]: at least the norm of key - step · (code - 128)
    centre: Tensor  # [B, KV, Dv]
    radius: Tensor  # float64 [B, KV]: no value lies farther from the centre
    longest: Tensor  # float64 [B, KV]: no key has a larger norm


def empty_page(key: Tensor, value: Tensor) -> Page:
    """A page for keys and values like these, float32 or float64."""
    batch, heads, _, dim = key.shape
    width = value.shape[3]
    shapes = [(PAGE, dim), (PAGE, width), (PAGE // BLOCK, -(-dim // 4), BLOCK, 4), (PAGE,), (PAGE,), (width,), (), ()]
    dtypes = [key.dtype, value.dtype, torch.uint8, key.dtype, key.dtype, value.dtype, torch.float64, torch.float64]
    sizes = [batch * heads * math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    sizes = [-(-size // 64) * 64 for size in sizes]
    parts = _memory(sum(sizes), key.device).split(sizes)
    page = Page(
        *(
            part.view(dtype)[: batch * heads * math.prod(shape)].view(batch, heads, *shape)
            for part, shape, dtype in zip(parts, shapes, dtypes, strict=True)
        )
    )
    for x in (page.centre, page.radius, page.longest):
        x.zero_()
    return page


def _memory(size: int, device: torch.device) -> Tensor:
    """Bytes, on huge pages where Linux has them: rows that are read here and there would miss a page table each."""
    if device.type != "cpu" or size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8, device=device)
    memory = torch.empty(size + HUGE, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % HUGE :][:size]
    ctypes.CDLL(None).madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    return memory


def fill(page: Page, slot: int, key: Tensor, value: Tensor) -> None:
    """Write keys ``[B, KV, n, D]`` and values from a slot on: the plain twin of the kernel's append."""
    stop = slot + key.shape[2]
    page.key[:, :, slot:stop], page.value[:, :, slot:stop] = key, value
    levels, step, residual = quantise(key)
    levels = torch.nn.functional.pad(levels, (0, -levels.shape[-1] % 4)).unflatten(-1, (-1, 4))
    slots = torch.arange(slot, stop, device=key.device)
    rows = page.code.permute(0, 1, 2, 4, 3, 5)  # [B, KV, PAGE / BLOCK, BLOCK, D / 4, 4]
    rows[:, :, slots // BLOCK, slots % BLOCK] = (levels + 128).to(torch.uint8)
    page.step[:, :, slot:stop], page.residual[:, :, slot:stop] = step, residual
    page.longest.copy_(torch.maximum(page.longest, _norms(key).amax(2)))
    if stop == PAGE:
        page.centre.copy_(page.value.double().mean(2))
        page.radius.copy_(_norms(page.value.double() - page.centre.double()[:, :, None]).amax(2))
    else:
        page.radius.copy_(torch.maximum(page.radius, _norms(value).amax(2)))


def quantise(key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys in 8 bits: levels ``[..., D]`` from -127 to 127, the step ``[...]`` between them, the error's norm.

    Each key has its own step, a 127th of its largest channel. Keys below 1e-30 are taken for 0.
    """
    largest = key.abs().amax(-1)
    step = torch.where(largest > 1e-30, largest / LEVELS, 0)
    inverse = torch.where(step > 0, LEVELS / largest, 0)
    levels = (key * inverse[..., None]).round().clamp(-LEVELS, LEVELS)
    rest = key.double() - step.double()[..., None] * levels.double()
    residual = (_norms(rest) + FLUSHED).to(key.dtype)
    return levels.to(torch.int16), step, torch.nextafter(residual, torch.full_like(residual, torch.inf))


def unpack(page: Page) -> Tensor:
    """The copy's keys ``[B, KV, PAGE, D]`` in float64."""
    levels = page.code.permute(0, 1, 2, 4, 3, 5).flatten(2, 3).flatten(3).double() - 128
    return levels[..., : page.key.shape[-1]] * page.step.double()[..., None]


def _norms(x: Tensor) -> Tensor:
    """Norms over the last dimension in float64, never too small."""
    return x.double().norm(dim=-1) * (1 + 1e-9)
