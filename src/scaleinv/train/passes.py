"""What every forward pass shares, in training, fine-tuning and evaluation: its precision and its size."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which a model computes in bfloat16 on a GPU (weights stay in float32), and unchanged on a CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def micro_batches(*tensors: Tensor, device: torch.device, tokens: int | None) -> list[tuple[Tensor, ...]]:
    """Tensors ``[B, N]`` of a batch, cut into the same parts, one per pass, on the device.

    Args:
        tokens: the most tokens per part, but at least one sequence; None for 65,536 on a GPU and 16,384 on a CPU.
    """
    limit = tokens or (65_536 if device.type == "cuda" else 16_384)
    rows = max(1, limit // tensors[0].shape[1])
    parts = (tensor.to(device, non_blocking=True).split(rows) for tensor in tensors)
    return list(zip(*parts, strict=True))
