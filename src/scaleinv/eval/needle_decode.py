"""What a model answers: the likeliest token each time, and how it judges the right answer.

Greedy decoding gives the right answer exactly if the likeliest token is right at every place of it, so one pass over
the whole sample settles most cases. Only if a token is wrong while needles are still open does the model continue from
its own mistake, reusing the haystack's keys and values from the first pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from scaleinv.data import Tokenizer
from scaleinv.eval.needle_task import NeedleTask, Sample, decided, longest_answer, score, stack
from scaleinv.model import GPT, CertifiedKVCache, KVCache
from scaleinv.model.cache import InfiniState


@dataclasses.dataclass(frozen=True)
class Reading:
    """One sample as the model reads it."""

    text: str
    """The model's answer, decoded greedily as far as needed to judge it."""
    correct: list[bool]
    """For each needle, whether city and number are right."""
    tokens: int
    """Number of tokens in the right answer."""
    tokens_right: int
    """How many of them are the likeliest after what precedes them."""
    loss: float
    """Their mean loss in nats."""


@torch.no_grad()
def read_samples(
    model: GPT, samples: Sequence[Sample], task: NeedleTask, tokenizer: Tokenizer, tolerance: float | None = None
) -> list[Reading]:
    """Read samples of one length, all at once; memory is linear in their length.

    With a tolerance, haystacks are read in full, and answers are decoded with a `CertifiedKVCache`.
    """
    device = next(model.parameters()).device
    tokens, mask = (x.to(device) for x in stack(samples))
    # The cache is filled up to the last token of the shortest prompt; the rest is then run for all samples together.
    start = min(sample.answer_start for sample in samples) - 1
    length = tokens.shape[1]
    cache = KVCache(context_length=length) if tolerance is None else CertifiedKVCache(tolerance, length)
    if start:
        model.hidden(tokens[:, :start], cache=cache, last=1)
    memory = dict(cache.infini)
    pieces = tokens[:, start:-1].split(length if tolerance is None else CertifiedKVCache.CHUNK, dim=1)
    hidden = torch.cat([model.hidden(piece, cache=cache) for piece in pieces], dim=1)
    logits = model.output(hidden).float()  # [B, n, V], of tokens start + 1 …
    targets, asked = tokens[:, start + 1 :].clone(), mask[:, start + 1 :]
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none") * asked
    likeliest = logits[..., : tokenizer.vocab_size].argmax(-1)
    wrong = asked & (likeliest != targets)
    texts, open_rows, known = [], [], []
    for row, sample in enumerate(samples):
        text = sample.answer
        if wrong[row].any():
            place = start + 1 + int(wrong[row].int().argmax())  # of the first wrong token
            tokens[row, place] = likeliest[row, place - start - 1]
            text = tokenizer.decode(tokens[row, sample.answer_start : place + 1].tolist())
            if not decided(text, sample):
                open_rows.append(row)
                known.append(place + 1)
        texts.append(text)
    if open_rows:
        rows = torch.tensor(open_rows, device=device)
        past = _fork(cache, rows, start, memory)
        asking = [samples[row] for row in open_rows]
        for row, text in zip(open_rows, _go_on(model, past, tokens[rows], known, asking, task, tokenizer), strict=True):
            texts[row] = text
    counts, right, total = asked.sum(1), (asked & ~wrong).sum(1), losses.sum(1, dtype=torch.float64)
    return [
        Reading(text, score(text, sample), int(counts[row]), int(right[row]), float(total[row] / counts[row]))
        for row, (text, sample) in enumerate(zip(texts, samples, strict=True))
    ]


def _go_on(
    model: GPT,
    cache: KVCache,
    tokens: Tensor,  # [B, N]
    known: list[int],
    samples: Sequence[Sample],
    task: NeedleTask,
    tokenizer: Tokenizer,
) -> list[str]:
    """Greedy answers, where the first ``known[row]`` tokens of each row are given; the cache holds a part of them."""
    room = max(sample.answer_start for sample in samples) + longest_answer(task, tokenizer)
    tokens = F.pad(tokens, (0, max(0, room - tokens.shape[1])))
    starts = [sample.answer_start for sample in samples]

    def answers(stop: int) -> list[str]:
        ends = [max(stop, given) for given in known]
        return [tokenizer.decode(row[a:b].tolist()) for row, a, b in zip(tokens, starts, ends, strict=True)]

    given = torch.tensor(known, device=tokens.device)
    place = min(known)
    texts = answers(place)
    while place < room and not all(decided(text, sample) for text, sample in zip(texts, samples, strict=True)):
        logits = model.output(model.hidden(tokens[:, cache.length : place], cache=cache, last=1)[:, -1])
        choice = logits[:, : tokenizer.vocab_size].argmax(-1)
        tokens[:, place] = torch.where(given > place, tokens[:, place], choice)
        place += 1
        texts = answers(place)
    return texts


def _fork(cache: KVCache, rows: Tensor, length: int, memory: dict[int, InfiniState]) -> KVCache:
    """The cache as it was after ``length`` tokens, for some rows of the batch."""
    if isinstance(cache, CertifiedKVCache):
        return cache.fork(rows, length)
    past = KVCache(context_length=cache.context_length)
    past.length = length
    past.tokens = None if cache.tokens is None else cache.tokens[rows, :length]
    if length:
        past.layers = {
            layer: (key[rows, :, :length], value[rows, :, :length]) for layer, (key, value) in cache.layers.items()
        }
    past.infini = {
        layer: InfiniState(*(getattr(state, field.name)[rows] for field in dataclasses.fields(state)))
        for layer, state in memory.items()
    }
    return past
