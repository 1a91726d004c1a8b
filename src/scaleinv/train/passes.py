"""What every forward pass shares, in training, fine-tuning and evaluation: its precision and its size."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from scaleinv.machine import Precision, arithmetic


def precision(device: torch.device, asked: Precision = "auto") -> contextlib.AbstractContextManager[object]:
    """A context in which a model whose weights are float32 computes in another precision, if that is asked for."""
    lower = arithmetic(asked, device.type) == "bfloat16"
    return torch.autocast(device.type, torch.bfloat16) if lower else contextlib.nullcontext()


def micro_batches(*tensors: Tensor, device: torch.device, tokens: int | None) -> list[tuple[Tensor, ...]]:
    """Tensors ``[B, N]`` of a batch, cut into the same parts, one per pass, on the device.

    Args:
        tokens: the most tokens per part, but at least one sequence; None for 65,536 on a GPU and 16,384 on a CPU.
    """
    limit = tokens or (65_536 if device.type == "cuda" else 16_384)
    rows = max(1, limit // tensors[0].shape[1])
    parts = (tensor.to(device, non_blocking=True).split(rows) for tensor in tensors)
    return list(zip(*parts, strict=True))
