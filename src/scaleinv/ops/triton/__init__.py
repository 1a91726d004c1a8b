"""A fused kernel of our own in Triton: forward, backward and decoding on NVIDIA GPUs.

Triton is imported by the first call that asks for it. On CPU the kernels run in Triton's interpreter, where
``TRITON_INTERPRET=1`` is set before that: slowly, for tests.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util

import torch
from torch import Tensor

from scaleinv.logits import LogitTransform, Plain
from scaleinv.ops.call import Call
from scaleinv.ops.masks import distance_tables
from scaleinv.ops.triton import configs

MAX_POSITIONS = 1 << 28
"""Positions are counted in 32 bits."""


def obstacle(call: Call) -> str | None:
    """Why the Triton kernel cannot serve the call; None if it can."""
    if call.query.dtype == torch.float64:
        return "the Triton kernel does not take float64"
    widest = max(call.query.shape[3], call.value.shape[3])
    if widest > configs.HEAD_DIMS[-1]:
        return f"the Triton kernel takes head dimensions up to {configs.HEAD_DIMS[-1]}, not {widest}"
    if call.geometry.queries + call.geometry.keys > MAX_POSITIONS:
        return f"the Triton kernel takes up to {MAX_POSITIONS} queries and keys"
    return _missing(call.device)


@torch.compiler.assume_constant_result
def _missing(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return 'triton is not installed (pip install "scaleinv[triton]")'
    if device.type == "cuda":
        if torch.version.hip:
            name = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
            return None if name in configs.TARGETS else f"of AMD's GPUs the Triton kernel takes gfx942, not {name}"
        major, minor = torch.cuda.get_device_capability(device)
        return None if major >= 8 else f"the Triton kernel needs compute capability 8.0, this GPU has {major}.{minor}"
    if device.type != "cpu":
        return f"the Triton kernel does not run on {device.type}"
    if not interpreted():
        return "the Triton kernel runs on CUDA; on CPU only in Triton's interpreter (TRITON_INTERPRET=1), for tests"
    return None


@functools.cache
def interpreted() -> bool:
    """Whether the kernels are run by Triton's interpreter."""
    return importlib.import_module("scaleinv.ops.triton.launch").INTERPRETED


def run(call: Call) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Nq, Dv]`` in value's dtype and logsumexp ``[B, H, Nq]`` in float32."""
    from scaleinv.ops.triton.operator import triton_forward

    geometry, gain, shift = call.geometry, None, None
    if not _is_plain(call.logits):
        gain, shift = distance_tables(call.logits, geometry, torch.float32, call.device)
    learned = any(x is not None and x.requires_grad for x in (gain, shift, call.query_gain))
    out, lse = triton_forward(
        call.query,
        call.key,
        call.value,
        call.query_gain,
        gain,
        shift,
        call.document_ids,
        call.key_mask,
        call.scale,
        geometry.offset,
        geometry.min_distance,
        geometry.max_distance,
        learned and torch.is_grad_enabled(),
    )
    return out.to(call.value.dtype), lse


def _is_plain(logits: LogitTransform) -> bool:
    """Whether a = 1 and m = 0 at every distance: then no table is read."""
    names = ("tables", "table_range", "compute")
    return isinstance(logits, Plain) and all(getattr(type(logits), name) is getattr(Plain, name) for name in names)
