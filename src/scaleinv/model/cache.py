"""What a decoding step needs from the past: keys and values of each layer, or Infini-attention's memory."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from scaleinv.logits import LogitTransform
from scaleinv.ops.api import attention
from scaleinv.ops.certified import Certificate, CertifiedCache


@dataclasses.dataclass
class InfiniState:
    """One layer of Infini-attention: the memory of whole segments, and the open segment's keys and values."""

    memory: Tensor  # [B, H, D, D]
    norm: Tensor  # [B, H, D]
    key: Tensor  # [B, H, n, D], without rotation, for the memory
    rotated_key: Tensor  # [B, H, n, D], for the local attention
    value: Tensor  # [B, H, n, D]


class KVCache:
    """Keys and values of every layer.

    Args:
        capacity: tokens to allocate room for at once; a longer text is an error. None grows as needed, by doubling.
        context_length: for NTK and YaRN, the length to stretch the rotary for from the start: the prompt and all that
            will be generated. Without it the rotary follows the length reached so far. Each time it changes, the past
            is recomputed, because keys with an old rotation would be wrong.
    """

    def __init__(self, capacity: int | None = None, context_length: int | None = None) -> None:
        for name, value in (("capacity", capacity), ("context_length", context_length)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        self.capacity = capacity
        self.context_length = context_length
        self.length = 0
        """Tokens that every layer holds."""
        self.tokens: Tensor | None = None
        """The text so far, kept if its past may have to be recomputed."""
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.infini: dict[int, InfiniState] = {}

    def reset(self) -> None:
        """Forget the text, but keep the memory already allocated."""
        self.length, self.tokens = 0, None
        self.infini.clear()

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values ``[B, H, n, D]``; returns all of the layer's so far."""
        stop = self.length + key.shape[2]
        if self.capacity is not None and stop > self.capacity:
            raise ValueError(f"capacity of the cache is {self.capacity} tokens, but the text has reached {stop}")
        held = self.layers.get(layer)
        if held is None or held[0].shape[2] < stop or held[0].shape[0] != key.shape[0]:
            room = self.capacity or 1 << max(6, (stop - 1).bit_length())
            grown = tuple(x.new_zeros(*x.shape[:2], room, x.shape[3]) for x in (key, value))
            if held is not None and self.length:
                for new, old in zip(grown, held, strict=True):
                    new[:, :, : self.length] = old[:, :, : self.length]
            held = (grown[0], grown[1])
            self.layers[layer] = held
        for buffer, new in zip(held, (key, value), strict=True):
            buffer[:, :, self.length : stop] = new
        return held[0][:, :, :stop], held[1][:, :, :stop]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        logits: LogitTransform,
        key_mask: Tensor | None,
        backend: str,
    ) -> Tensor:
        """Append new tokens ``[B, H, n, D]`` to the layer's past; returns their attention to all of it.

        Queries may be fewer than keys: they are those of the last tokens.
        """
        key, value = self.extend(layer, key, value)
        return attention(query, key, value, logits, key_mask=key_mask, backend=backend)

    def remember(self, tokens: Tensor) -> None:
        """Add tokens to the text that is held."""
        self.tokens = torch.cat([self.tokens, tokens], dim=1) if self.length and self.tokens is not None else tokens


class CertifiedKVCache(KVCache):
    """Keys and values of every layer, of which a step reads only those that matter: see `CertifiedCache`.

    Args:
        tolerance: the share of a query's softmax weight that may be left unread, in every layer and head.
        context_length: as in `KVCache`.
    """

    CHUNK = 64
    """At most this many new tokens at once are certified; a longer piece, such as a prompt, gets exact attention."""

    def __init__(self, tolerance: float, context_length: int | None = None) -> None:
        super().__init__(context_length=context_length)
        CertifiedCache(tolerance=tolerance)  # a bad tolerance is an error here, not at the first token
        self.tolerance = tolerance
        self.certified: dict[int, CertifiedCache] = {}
        self.certificates: dict[int, Certificate] = {}
        """The certificate of each layer's last step."""

    def reset(self) -> None:
        """Forget the text, and free its memory."""
        super().reset()
        self.certified.clear()
        self.certificates.clear()

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        logits: LogitTransform,
        key_mask: Tensor | None,
        backend: str,
    ) -> Tensor:
        held = self.certified.setdefault(layer, CertifiedCache(logits, self.tolerance))
        if held.length != self.length:
            raise ValueError("cache holds part of a step that failed: reset() it and read the text again")
        held.append(key, value)
        if key.shape[2] <= self.CHUNK:
            out, self.certificates[layer] = held.attend(query, key_mask=key_mask)
            return out
        if self.length:
            key, value = (x.to(query.dtype) for x in held.tensors())
        return attention(query, key, value, logits, key_mask=key_mask, backend=backend)

    def fork(self, rows: Tensor, length: int) -> CertifiedKVCache:
        """A separate cache for some rows of the batch and the first ``length`` tokens."""
        past = CertifiedKVCache(self.tolerance, self.context_length)
        past.length = length
        past.tokens = None if self.tokens is None else self.tokens[rows, :length]
        for layer, held in self.certified.items():
            if length:
                key, value = held.tensors()
                past.certified[layer] = CertifiedCache(held.logits, self.tolerance)
                past.certified[layer].append(key[rows, :, :length], value[rows, :, :length])
        return past
