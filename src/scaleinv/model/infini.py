"""Infini-attention (Munkhdalai et al. 2024, arXiv 2404.07143): local attention in segments and a compressive memory.

Each segment attends causally inside itself and reads a memory of the segments before it; the memory then learns the
segment by the delta rule. Memory reads and writes use queries and keys without rotation, the local part rotated ones.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from scaleinv.logits import LogitTransform
from scaleinv.model.cache import InfiniState
from scaleinv.ops.api import attention


def empty_state(key: Tensor, value: Tensor) -> InfiniState:
    """The state before the first token, for keys and values ``[B, H, n, D]``."""
    memory = key.new_zeros(*key.shape[:2], key.shape[3], value.shape[3], dtype=torch.float32)
    return InfiniState(
        memory, memory.new_zeros(*key.shape[:2], key.shape[3]), key[:, :, :0], key[:, :, :0], value[:, :, :0]
    )


def infini_attention(
    query: Tensor,  # [B, H, N, D]
    key: Tensor,
    value: Tensor,
    rotated_query: Tensor,
    rotated_key: Tensor,
    gate: Tensor,  # [H], before the sigmoid
    logits: LogitTransform,
    segment: int,
    state: InfiniState,
    backend: str = "auto",
) -> tuple[Tensor, InfiniState]:
    """Output ``[B, H, N, D]`` and the state after the last token, however a text is split into calls."""
    share = torch.sigmoid(gate)[:, None, None]
    outputs = []
    start = 0
    while start < query.shape[2]:
        stop = min(start + segment - state.key.shape[2], query.shape[2])
        piece = slice(start, stop)
        state = InfiniState(
            state.memory,
            state.norm,
            torch.cat([state.key, key[:, :, piece]], dim=2),
            torch.cat([state.rotated_key, rotated_key[:, :, piece]], dim=2),
            torch.cat([state.value, value[:, :, piece]], dim=2),
        )
        local = attention(rotated_query[:, :, piece], state.rotated_key, state.value, logits, backend=backend)
        remembered = read(state.memory, state.norm, query[:, :, piece])
        outputs.append((share * remembered + (1 - share) * local).to(value.dtype))
        if state.key.shape[2] == segment:
            state = learn(state)
        start = stop
    return torch.cat(outputs, dim=2), state


def features(x: Tensor) -> Tensor:
    """φ(x) = ELU(x) + 1, positive."""
    return F.elu(x.to(torch.float32)) + 1


def read(memory: Tensor, norm: Tensor, query: Tensor) -> Tensor:
    """φ(Q) M / (φ(Q) z); 0 while the memory is empty."""
    active = features(query)
    weight = active @ norm[..., None]
    return (active @ memory) / weight.clamp_min(torch.finfo(torch.float32).tiny)


def learn(state: InfiniState) -> InfiniState:
    """Delta rule: M += φ(K)ᵀ (V - φ(K) M / (φ(K) z)), z += Σ φ(K); the segment is closed."""
    active = features(state.key)
    novel = state.value.to(torch.float32) - read(state.memory, state.norm, state.key)
    memory = state.memory + active.transpose(-1, -2) @ novel
    norm = state.norm + active.sum(dim=2)
    return InfiniState(memory, norm, state.key[:, :, :0], state.rotated_key[:, :, :0], state.value[:, :, :0])
