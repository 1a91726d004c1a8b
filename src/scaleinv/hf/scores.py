"""The mean and variance of a model's scores, head by head: what `scaleinv.hf.convert(fit=…)` fits the logits to.

    fit = scaleinv.hf.measure_scores(model, tokens)
    scaleinv.hf.convert(model, p=None, stretch="yarn", fit=fit)

`observed` shows what reaches the attention layers; `scaleinv.analysis` uses it too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from scaleinv.hf.attention import attention_forward
from scaleinv.hf.config import ATTENTION
from scaleinv.hf.convert import conversion, convert, revert
from scaleinv.hf.mask import Regular

QUERIES = 128
"""Queries measured in each window: enough, and the scores of a long window fit into memory."""


class Scores(NamedTuple):
    """Float64 ``[layers, query heads]``. A layer without softmax attention has mean 0 and variance 1."""

    mean: Tensor
    variance: Tensor


@contextlib.contextmanager
def observed(model: PreTrainedModel, see: Callable[..., object]) -> Iterator[None]:
    """While inside, ``see(layer, query, key, mask, options)`` gets what reaches each attention layer of a forward pass.

    A stock model runs as a conversion to plain logits: the same function, computed by our attention, which knows the
    geometry (such as a sliding window) and needs no N × N mask. A converted model runs as it is.
    """
    stock = conversion(model) is None
    if stock:
        convert(model, logits="plain", p=None)
    text = model.config.get_text_config()

    def forward(module: Any, query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
        if module.config is text:
            see(module, query, key, rest[1] if len(rest) > 1 else options.get("attention_mask"), options)
        return attention_forward(module, query, key, *rest, **options)

    AttentionInterface.register(ATTENTION, forward)
    try:
        yield
    finally:
        AttentionInterface.register(ATTENTION, attention_forward)
        if stock:
            revert(model)


@torch.no_grad()
def measure_scores(model: PreTrainedModel, tokens: Tensor) -> Scores:
    """Mean and variance of the scores of every head, over the pairs of query and key that attention sees.

    The first key of a window is left out: heads rest on it, with scores that say nothing of the others.

    Args:
        tokens: windows of text ``[B, N]``, N at least 3 and at most what the model was trained for. A few thousand
            tokens are enough.
    """
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.shape[0] < 1 or tokens.shape[1] < 3:
        raise ValueError(f"tokens must be integers [B, N] with N at least 3, got {tokens.dtype} {list(tokens.shape)}")
    text = model.config.get_text_config()
    shape = text.num_hidden_layers, text.num_attention_heads
    count = torch.zeros(shape[0], 1, dtype=torch.float64)
    total, square = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)

    def see(layer: Any, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]) -> None:
        assert isinstance(mask, Regular), "no padding, no packed documents"
        S, seen = _scores(query, key, mask.window, options)
        number = layer.layer_idx
        count[number] += int(seen.sum())
        S = torch.where(seen, S.to(torch.float64), 0.0)
        total[number] += S.sum((0, 2, 3)).cpu()
        square[number] += S.square().sum((0, 2, 3)).cpu()

    training = model.training
    model.eval()
    try:
        with observed(model, see):
            for window in tokens.split(1):
                model.base_model(input_ids=window.to(model.device), use_cache=False)
    finally:
        model.train(training)
    seen = count > 0
    mean = torch.where(seen, total / count.clamp_min(1), 0.0)
    variance = torch.where(seen, square / count.clamp_min(1) - mean.square(), 1.0)
    if not bool((variance > 1e-8).all()):
        layer, head = divmod(int((variance > 1e-8).int().flatten().argmin()), shape[1])
        raise ValueError(f"the scores of layer {layer}, head {head} do not vary over these tokens: give other text")
    return Scores(mean, variance)


def _scores(query: Tensor, key: Tensor, window: int | None, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Scores ``[B, H, R, N]`` of up to `QUERIES` queries, spread evenly, and which pairs count ``[R, N]``."""
    length = query.shape[2]
    device = query.device
    place = torch.linspace(1, length - 1, min(QUERIES, length - 1), dtype=torch.float64, device=device).round().long()
    dtype = torch.promote_types(query.dtype, torch.float32)
    grouped = query[:, :, place].to(dtype).unflatten(1, (key.shape[1], -1))  # [B, KV, H / KV, R, D]
    scaling = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    S = scale * (grouped @ key.to(dtype).unsqueeze(2).transpose(-1, -2)).flatten(1, 2)
    softcap = options.get("softcap")
    if softcap is not None:
        S = softcap * torch.tanh(S / softcap)
    distance = place[:, None] - torch.arange(length, device=device)
    seen = (distance >= 0) & (distance < (window or length))
    seen[:, 0] = False
    return S, seen
