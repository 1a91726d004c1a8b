"""Triton's interpreter, mended: bfloat16 rounds and multiplies as on a GPU, and calls of kernel functions are quick.

As it comes, the interpreter truncates float32 to bfloat16 and multiplies the raw bits of two bfloat16 tiles. And it
patches Triton's language anew whenever one kernel function calls another, which takes a third of its time.
"""

# mypy: ignore-errors

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.language import standard
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

_cast, _dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot


def mend() -> None:
    """Change the interpreter of this process; a second time changes nothing."""
    if InterpreterBuilder.cast_impl is _cast:
        interpreter._patch_lang(
            standard.max.fn
        )  # what the language's own functions see; the kernels' launch does the rest
        InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)
        InterpreterBuilder.cast_impl = _rounding_cast
        InterpreterBuilder.create_dot = _widening_dot


def _rounding_cast(self, src, dst_type):
    if (src.dtype.scalar, dst_type.scalar) == (tl.float32, tl.bfloat16):
        return TensorHandle(to_bfloat16(src.data), tl.bfloat16)
    return _cast(self, src, dst_type)


def _widening_dot(self, a, b, *rest):
    return _dot(self, _widened(a), _widened(b), *rest)


def _widened(x):
    return TensorHandle(to_float32(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def to_float32(bits: np.ndarray) -> np.ndarray:
    """bfloat16, given by its bits, in float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
