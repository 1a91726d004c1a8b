"""Loss by length of a Hugging Face model, on the same held-out tokens."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache

from scaleinv.data import TokenData
from scaleinv.hf import rope, stretch
from scaleinv.progress import Progress, Report
from scaleinv.train.distributed import World
from scaleinv.train.validation import LengthLoss, loss_at_length

LOGITS = 1 << 26
"""Logits in memory at a time (256 MB in float32): long windows are read in chunks, with a cache."""

WHOLE = ("dynamic", "longrope")
"""Rotary types whose frequencies depend on how much was read so far: a window is read at once, with all its logits."""


class Reader(nn.Module):
    """A causal language model that gives the loss of each token, as `loss_at_length` asks for it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        text = model.config.get_text_config()
        turns_anew = any(values.get("rope_type") in WHOLE for _, values in rope.flat(text))
        self.chunk = sys.maxsize if turns_anew else max(16, LOGITS // text.vocab_size)

    def forward(self, inputs: Tensor, targets: Tensor, document_ids: None = None) -> Tensor:
        """Losses ``[B, N]`` in nats of tokens ``[B, N]``."""
        rows = max(1, self.chunk // inputs.shape[1])
        pairs = zip(inputs.split(rows), targets.split(rows), strict=True)
        return torch.cat([self._losses(*pair) for pair in pairs])

    def _losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        length = inputs.shape[1]
        for state in stretch.states(self.model):
            state.fixed = length
        if length <= self.chunk:
            return _loss(self.model(input_ids=inputs, use_cache=False).logits, targets)
        cache = DynamicCache(config=self.model.config.get_text_config())
        pairs = zip(inputs.split(self.chunk, 1), targets.split(self.chunk, 1), strict=True)
        found = [_loss(self.model(input_ids=x, past_key_values=cache, use_cache=True).logits, y) for x, y in pairs]
        return torch.cat(found, dim=1)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    rows = logits.float().flatten(0, 1)  # a softmax over a dimension that is not the last takes several times as long
    return F.cross_entropy(rows, targets.flatten(), reduction="none").view_as(targets)


def losses_by_length(
    model: Any, data: TokenData, lengths: dict[str, int], tokens: int, here: World, name: str, progress: Progress
) -> dict[str, LengthLoss]:
    """The loss of a model at each length, over the first ``tokens`` tokens; all ranks call it and get the same."""
    reader = Reader(model.to(here.device))
    found = {}
    for label, length in lengths.items():

        def show(done: int, total: int, label: str = label) -> None:
            text = f"{name} at {label}: {done}/{total} windows"
            progress(Report(text, passing=True, kind="windows", method=name, length=label, done=done, total=total))

        found[label] = loss_at_length(reader, data, length, tokens // length * length, here=here, progress=show)
        mean = found[label].mean
        words = f"{name} at {label} ({length:,} tokens): {mean:.4f}"
        progress(Report(words, kind="evaluated", method=name, length=label, mean=mean))
    for state in stretch.states(model):
        state.fixed = None
    return found
