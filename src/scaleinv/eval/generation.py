"""Text from a model: temperature, top-k, top-p, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from scaleinv.eval.certified import check_tolerance
from scaleinv.model import GPT, CertifiedKVCache, KVCache


@torch.no_grad()
def generate(
    model: GPT,
    prompt: Tensor,
    tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: int | None = None,
    vocabulary: int | None = None,
    tolerance: float | None = None,
) -> Iterator[int]:
    """Yield up to ``tokens`` new ids after the prompt, as they are made.

    Args:
        prompt: ids ``[N]``, at least one.
        temperature: 0 takes the most likely token each time.
        top_k: choose among the k most likely only.
        top_p: choose among the fewest tokens that together have this probability.
        seed: of the sampling; None for another text each time.
        stop: an id that ends the text; it is not yielded.
        vocabulary: ids of this or more are never chosen (a model's vocabulary may be padded past its tokenizer's).
        tolerance: decode with a `CertifiedKVCache`: each step leaves at most this share of the attention unread. None
            reads everything.
    """
    if prompt.dim() != 1 or prompt.numel() == 0:
        raise ValueError(f"prompt must be a non-empty 1-D tensor of ids, got shape {tuple(prompt.shape)}")
    if tokens < 0:
        raise ValueError(f"tokens must not be negative, got {tokens}")
    if not temperature >= 0:
        raise ValueError(f"temperature must not be negative, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be positive, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
    check_tolerance(tolerance, model.config.method)
    return _generate(model, prompt, tokens, temperature, top_k, top_p, seed, stop, vocabulary, tolerance)


@torch.no_grad()
def _generate(
    model: GPT,
    prompt: Tensor,
    tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    stop: int | None,
    vocabulary: int | None,
    tolerance: float | None,
) -> Iterator[int]:
    device = next(model.parameters()).device
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    length = prompt.numel() + tokens
    cache = KVCache(context_length=length) if tolerance is None else CertifiedKVCache(tolerance, length)
    step = prompt[None].to(device)
    for _ in range(tokens):
        logits = model.output(model.hidden(step, cache=cache, last=1)[:, -1]).float()[0, :vocabulary]
        choice = _choose(logits, temperature, top_k, top_p, generator)
        if choice == stop:
            return
        yield choice
        step = torch.tensor([[choice]], device=device)


def _choose(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> int:
    if temperature == 0:
        return int(logits.argmax())
    logits = (logits.double() - logits.max()) / temperature  # at most 0: a low temperature cannot overflow
    if top_k is not None and top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    if top_p is not None:
        ordered, order = logits.softmax(-1).sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p  # the first to reach top_p stays
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(0, order, beyond), -torch.inf)
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
