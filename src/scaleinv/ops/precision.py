"""`torch.autocast`: it casts our inputs, but does not reach inside."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as `torch.autocast` would cast them for scaled_dot_product_attention: one lower dtype for all."""
    if not all(isinstance(x, Tensor) for x in tensors) or not _active(tensors[0].device):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """A context with autocast off: logits and sums stay in float32, matrix products included."""
    return torch.autocast(device.type, enabled=False) if _active(device) else contextlib.nullcontext()


def _active(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
