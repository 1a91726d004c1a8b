"""The packed table: one 64-bit (a, m) entry for each distance, with hidden entries before and after.

Hidden distances hold a = 0 and m = -inf, so that one gather applies the causal mask, the window and the logits. a is
multiplied by ``scale · log2(e)`` and m by ``log2(e)``: the kernels take powers of 2.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaleinv.ops.masks import Geometry

LOG2E = 1.4426950408889634
PAD = 512
"""Hidden entries at each end. Tiles at the border reach up to BLOCK_M + BLOCK_N - 2 past the last distance."""

BLOCK = 1024


@triton.jit
def pack_kernel(
    gain, shift, packed, length, width, first, min_distance, max_distance, gain_stride, shift_stride, factor,
    PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    distance = first + place - PAD
    index = tl.abs(distance)
    visible = (distance >= min_distance) & (distance <= max_distance) & (index < length)
    a = tl.load(gain + head * gain_stride + index, mask=visible, other=0.0) * factor
    m = tl.load(shift + head * shift_stride + index, mask=visible, other=float("-inf")) * 1.4426950408889634
    target = packed + 2 * (head.to(tl.int64) * width + place)
    tl.store(target, a, mask=place < width)
    tl.store(target + 1, m, mask=place < width)


def pack(gain: Tensor, shift: Tensor, geometry: Geometry, scale: float) -> Tensor:
    """The packed table, int64 ``[heads or 1, Nq + Nk - 1 + 2 PAD]``: entry x holds distance ``first + x - PAD``.

    Args:
        gain, shift: a and m over the distance, float32 ``[heads or 1, T]``; the two may differ in heads.
        geometry: with distances that count from the table's first entry and fit into 32 bits.
        scale: what multiplies ``q·k``.
    """
    heads, length = max(gain.shape[0], shift.shape[0]), gain.shape[1]
    width = geometry.queries + geometry.keys - 1 + 2 * PAD
    packed = torch.empty(heads, width, 2, dtype=torch.float32, device=gain.device)
    grid = (triton.cdiv(width, BLOCK), heads)
    pack_kernel[grid](
        gain, shift, packed, length, width, geometry.first, geometry.min_distance, geometry.max_distance,
        head_stride(gain), head_stride(shift), scale * LOG2E, PAD, BLOCK,
    )  # fmt: skip
    return packed.view(torch.int64).squeeze(-1)


def head_stride(table: Tensor) -> int:
    """From one head's table to the next; 0 where all heads share one."""
    return table.stride(0) if table.shape[0] > 1 else 0
