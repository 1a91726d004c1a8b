"""What reaches attention in a model: queries and keys, layer after layer, on real text.

`capture` runs the model once and passes on each `Layer` as the model reaches it. Nothing is kept: the receiver computes
what it needs, for a block of queries at a time, so that no N × N matrix ever exists.

Works on our `GPT` and on Hugging Face models (`scaleinv.analysis.capture_hf` says which).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scaleinv.logits import LogitTransform
from scaleinv.model import GPT
from scaleinv.model.gpt import norm
from scaleinv.rotary import rotate

BLOCK = 1 << 21
"""Scores held at once: 16 MB in float64."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """Queries and keys of one layer, and how attention turns them into logits. Query n and key n share a position."""

    index: int
    """The layer's number in the model."""
    query: Tensor
    """``[B, H, N, D]``, after QK-norm and the rotary."""
    key: Tensor
    """``[B, KV, N, D]``; query head h reads key head ``h // (H / KV)``."""
    unrotated: tuple[Tensor, Tensor] | None
    """Query and key before the rotary; None if the model does not show them."""
    transform: LogitTransform
    scale: float
    """Multiplies q·k."""
    window: int | None = None
    """Only keys at distances below this are seen."""
    softcap: float | None = None
    """The score becomes ``softcap · tanh(score / softcap)`` (Gemma 2)."""
    sinks: Tensor | None = None
    """One logit per head that takes its share of the softmax and reads nothing (GPT-OSS)."""

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.query.shape[1]

    @property
    def length(self) -> int:
        """N."""
        return self.query.shape[2]

    def scores(self, positions: Tensor, rotary: bool = True) -> Tensor:
        """S of the queries at ``positions [R]``: ``[B, H, R, N]``, one column per key, seen or not.

        In float32, or float64 for a float64 model.
        """
        if not rotary and self.unrotated is None:
            raise ValueError(f"rotary=False is not available in layer {self.index}: its rotary is hidden")
        query, key = (self.query, self.key) if rotary or self.unrotated is None else self.unrotated
        dtype = torch.promote_types(query.dtype, torch.float32)
        grouped = query[:, :, positions].to(dtype).unflatten(1, (key.shape[1], -1))  # [B, KV, H / KV, R, D]
        scores = self.scale * (grouped @ key.to(dtype).unsqueeze(2).transpose(-1, -2)).flatten(1, 2)
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def logits(self, positions: Tensor) -> Tensor:
        """L of the queries at ``positions [R]``: float64 ``[B, H, R, N]``, one column per distance.

        -inf where there is no key at that distance, or where it is hidden.
        """
        distance = torch.arange(self.length, device=positions.device)
        place = positions[:, None] - distance  # [R, N]: the key at each distance
        scores = self.scores(positions).to(torch.float64)
        scores = scores.gather(-1, place.clamp_min(0).expand_as(scores))
        transform = copy.deepcopy(self.transform)  # long float64 tables should not stay in the model's cache
        seen = (positions + 1).clamp_max(self.window or self.length)
        gain = transform.gain_of_queries(lambda: seen[None], context=self.length)
        if gain is not None:
            scores = scores * gain[..., None].to(torch.float64)
        scale, shift = transform.tables(self.length, dtype=torch.float64, device=scores.device)
        hidden = (place < 0) | (distance >= (self.window or self.length))
        return (scale[:, None] * scores + shift[:, None]).masked_fill(hidden, -torch.inf)


Consume = Callable[[Layer], None]


@torch.no_grad()
def capture(model: nn.Module, tokens: Tensor, consume: Consume) -> None:
    """Run a model over ``tokens [B, N]`` and call ``consume`` with every layer, in order, as the model reaches it.

    Args:
        model: our `GPT` or a Hugging Face causal language model; it is restored afterwards.
    """
    training = model.training
    model.eval()
    try:
        own = _own(model)
        if own is not None:
            _capture_gpt(own, tokens.to(own.embedding.weight.device), consume)
        else:
            _hf(model).capture_hf(model, tokens, consume)
    finally:
        model.train(training)


def training_length(model: nn.Module) -> int:
    """Tokens in a training sequence: our config's, or ``max_position_embeddings`` of a Hugging Face model."""
    own = _own(model)
    if own is not None:
        return own.config.train_length
    return _hf(model).training_length(model)


def model_name(model: nn.Module) -> str:
    """A name for a model: our GPT's method, or the end of a Hugging Face model's path."""
    own = _own(model)
    if own is not None:
        return own.config.method
    return _hf(model).model_name(model)


def windows_of(tokens: Tensor | Sequence[int], length: int, count: int, bos: int | None = None) -> Iterator[Tensor]:
    """Up to ``count`` windows ``[1, length]`` that follow on one another in ``tokens [T]``.

    Args:
        bos: a token to put before each window, for models that always saw one there; it counts in the length.
    """
    stream = torch.as_tensor(tokens)
    if stream.dim() != 1 or stream.is_floating_point():
        raise ValueError(f"tokens must be integers of shape [T], got {stream.dtype} {list(stream.shape)}")
    if count < 1:
        raise ValueError(f"windows must be at least 1, got {count}")
    text = length if bos is None else length - 1
    if not 1 <= text <= stream.numel():
        raise ValueError(f"lengths must lie in 2 … {stream.numel()}, the number of tokens, got {length}")
    prefix = stream.new_tensor([] if bos is None else [bos])
    found = min(count, stream.numel() // text)
    return (torch.cat([prefix, stream[n * text : (n + 1) * text]]).to(torch.int64)[None] for n in range(found))


def blocks_of(positions: Tensor, layer: Layer, block: int | None = None) -> tuple[Tensor, ...]:
    """``positions`` in blocks of ``block`` queries; None for as many as `BLOCK` allows."""
    if block is not None and block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    return positions.to(layer.query.device).split(block or max(1, BLOCK // (layer.heads * layer.length)))


def _own(model: nn.Module) -> GPT | None:
    """The model, or what it wraps (as `scaleinv.hf.gpt` does), if that is our GPT."""
    inner = getattr(model, "gpt", model)
    return inner if isinstance(inner, GPT) else None


def _capture_gpt(model: GPT, tokens: Tensor, consume: Consume) -> None:
    if model.method.infini:
        raise ValueError(f"model must attend to its whole context, got {model.method.name}: Infini-attention does not")

    def hook(module: Any, inputs: tuple[Any, ...]) -> None:
        x, turn = inputs[:2]
        query, key = (
            norm(project(x).unflatten(-1, (module.heads, -1)).transpose(1, 2)) for project in (module.query, module.key)
        )
        rotated = (query, key) if turn is None else (rotate(query, *turn), rotate(key, *turn))
        consume(Layer(module.layer, *rotated, (query, key), module.logits, query.shape[-1] ** -0.5))

    handles = [block.attention.register_forward_pre_hook(hook) for block in model.blocks]  # type: ignore[union-attr]
    try:
        model.hidden(tokens)
    finally:
        for handle in handles:
            handle.remove()


def _hf(model: nn.Module) -> Any:
    """The module for Hugging Face models, imported when there is one."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        known = False
    else:
        known = isinstance(model, PreTrainedModel)
    if not known:
        raise TypeError(f"model must be a scaleinv GPT or a Hugging Face model, got {type(model).__name__}")
    from scaleinv.analysis import capture_hf

    return capture_hf
