"""`check`: does a model give the same logits however the same tokens reach it?"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from scaleinv.hf import stretch


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """The largest difference of a logit in each comparison, and what is allowed."""

    differences: dict[str, float]
    tolerance: float

    @property
    def ok(self) -> bool:
        return all(difference <= self.tolerance for difference in self.differences.values())

    def __str__(self) -> str:
        lines = []
        for name, difference in self.differences.items():
            verdict = "ok" if difference <= self.tolerance else "DIFFERS"
            lines.append(f"{name:<24} {difference:.1e}  {verdict}")
        return "\n".join([*lines, f"largest difference of a logit; up to {self.tolerance:.1e} is rounding"])


@torch.no_grad()
def check(
    model: PreTrainedModel,
    *,
    length: int = 96,
    seed: int = 0,
    tolerance: float | None = None,
    progress: Callable[[str], Any] | None = print,
) -> CheckResult:
    """Compare the logits of one forward pass with those of the other ways to compute them, on random tokens.

    - cached = full: a prefill, a chunk and single steps on a cache, against one forward;
    - padded = unpadded: two texts side by side with padding on the left, against each alone;
    - packed = split: two texts in one row with `position_ids` that start anew, against each alone.

    A model with a stretch is compared as stretched to four times its trained length.

    Args:
        model: a causal language model, converted or not; it comes back in the mode (train or eval) that it had.
        length: tokens in the longest text; above a sliding window, so that it matters.
        tolerance: None for 1e-4 in float32 and 0.1 in the 16-bit types, times the largest logit where that is over 1.
        progress: called with the result as text; None for silence.
    """
    if length < 16:
        raise ValueError(f"length must be at least 16, got {length}")
    training = model.training
    model.eval()
    stretched = [(state, state.fixed) for state in stretch.states(model)]
    try:
        for state, _ in stretched:
            state.fixed = 4 * stretch.train_length(model)
        generator = torch.Generator().manual_seed(seed)
        vocabulary = model.config.get_text_config().vocab_size
        tokens = torch.randint(vocabulary, (1, length), generator=generator).to(model.device)
        full = _logits(model, tokens)
        if tolerance is None:
            tolerance = (1e-4 if full.dtype == torch.float32 else 0.1) * max(1.0, full.abs().max().item())
        comparisons = (
            ("cached = full", _cached(model, tokens), full),
            ("padded = unpadded", *_padded(model, tokens, full)),
            ("packed = split", *_packed(model, tokens, full)),
        )
    finally:
        model.train(training)
        for state, fixed in stretched:
            state.fixed = fixed
    result = CheckResult(
        {name: (got.float() - expected.float()).abs().max().item() for name, got, expected in comparisons}, tolerance
    )
    if progress is not None:
        progress(str(result))
    return result


def _logits(model: PreTrainedModel, tokens: Tensor, **inputs: Any) -> Tensor:
    return model(input_ids=tokens, **{"use_cache": False, **inputs}).logits


def _cached(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    cache = DynamicCache(config=model.config)
    length = tokens.shape[1]
    cuts = [0, length // 2, length - 4, *range(length - 3, length + 1)]
    steps = (tokens[:, start:stop] for start, stop in itertools.pairwise(cuts))
    return torch.cat([_logits(model, step, past_key_values=cache, use_cache=True) for step in steps], dim=1)


def _padded(model: PreTrainedModel, tokens: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
    short = tokens[:, : tokens.shape[1] // 3]
    mask = torch.ones(2, tokens.shape[1], dtype=torch.long, device=tokens.device)
    mask[1, : -short.shape[1]] = 0
    rows = torch.cat([tokens, tokens.roll(short.shape[1], 1)])  # the second row: garbage, then the short text
    rows[1, -short.shape[1] :] = short
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    got = _logits(model, rows, attention_mask=mask, position_ids=positions)
    expected = torch.cat([full[0], _logits(model, short)[0]])
    return torch.cat([got[0], got[1, -short.shape[1] :]]), expected


def _packed(model: PreTrainedModel, tokens: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
    short = tokens[:, : tokens.shape[1] // 3].flip(1)
    positions = torch.cat([torch.arange(x.shape[1], device=tokens.device) for x in (short, tokens)])[None]
    got = _logits(model, torch.cat([short, tokens], dim=1), position_ids=positions)
    return got, torch.cat([_logits(model, short), full], dim=1)
