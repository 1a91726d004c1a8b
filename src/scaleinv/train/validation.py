"""Validation loss on the same tokens, cut into windows of any length."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import torch
from torch import nn

from scaleinv.data import TokenData
from scaleinv.train.distributed import World
from scaleinv.train.passes import precision

WINDOW_TOKENS = 16_384
"""Tokens per forward pass, unless a single window is longer."""


@dataclasses.dataclass(frozen=True)
class LengthLoss:
    """Loss in nats per token over windows of one length."""

    length: int
    mean: float
    stderr: float | None
    """Standard error of the mean, over windows; None for a single window."""
    windows: int
    positions: list[tuple[int, int, float]]
    """Mean loss by place in the window: (first, past the last, loss), in ranges that double."""
    losses: list[float] = dataclasses.field(default_factory=list)
    """Loss of each window, in the order of the text, to pair with another model's; empty if they were not kept."""

    @property
    def tokens(self) -> int:
        return self.length * self.windows


def usable_tokens(total: int, wanted: int, lengths: list[int]) -> int:
    """The largest count up to ``wanted`` that every window length divides and for which the data has targets.

    If there is none, only the longest length divides the count, and shorter ones leave out the rest of a window.
    """
    longest, most = max(lengths), min(wanted, total - 1)
    if most < longest:
        raise ValueError(
            f"validation at length {longest} needs at least {longest + 1} tokens, "
            f"but there are {total} (and {wanted} are asked for)"
        )
    step = math.lcm(*lengths)
    return most // step * step or most // longest * longest


def fitting(lengths: dict[str, int], total: int, wanted: int) -> dict[str, int]:
    """The lengths that ``wanted`` of ``total`` tokens have room for; ValueError if there are none."""
    most = min(wanted, total - 1)
    found = {label: length for label, length in lengths.items() if length <= most}
    if lengths and not found:
        shortest = min(lengths.values())
        raise ValueError(
            f"validation at length {shortest} needs val_tokens of at least {shortest} and {shortest + 1} tokens in "
            f"the validation split, got {wanted} and {total}"
        )
    return found


@torch.no_grad()
def loss_at_length(
    model: nn.Module,
    data: TokenData,
    length: int,
    tokens: int,
    *,
    here: World | None = None,
    document_masks: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> LengthLoss:
    """Loss over the first ``tokens`` tokens of the data in windows of ``length``, which divides it.

    Args:
        here: the ranks that share the work; all of them call it together and get the same answer.
        document_masks: documents in a window do not see each other.
        progress: called with windows done and windows in all.
    """
    here = here or World(0, 1, next(model.parameters()).device)
    count = tokens // length
    if count < 1 or tokens % length:
        raise ValueError(f"tokens must be a positive multiple of length {length}, got {tokens}")
    batch = max(1, WINDOW_TOKENS // length)
    runs, positions = here.runs(length), here.positions(length)
    stream = data.windows(length, tokens, runs)
    edges = [0, *(1 << power for power in range((length - 1).bit_length())), length]
    means = torch.zeros(count, dtype=torch.float64, device=here.device)
    places = torch.zeros(length, dtype=torch.float64, device=here.device)
    was_training = model.training
    model.eval()
    # Ranks take turns, and all take the same number of batches: under FSDP a forward needs all ranks.
    batches = math.ceil(count / batch)
    idle = [next(data.windows(length, tokens, runs))]  # for a rank that finds no window left
    for number in range(math.ceil(batches / here.groups) * here.groups):
        start = number * batch
        pairs = [next(stream) for _ in range(min(batch, max(count - start, 0)))]
        if number % here.groups != here.group:
            continue
        counted = len(pairs)
        inputs, targets = (torch.stack(x).to(here.device) for x in zip(*(pairs or idle), strict=True))
        ids = here.document_ids(inputs, data.end_of_text) if document_masks else None
        with precision(here.device):
            losses = model(inputs, targets, document_ids=ids)[:counted].to(torch.float64)
        means[start : start + counted] = losses.sum(dim=1) / length
        places[positions] += losses.sum(dim=0)
        if progress is not None:
            progress(min(start + batch, count), count)
    model.train(was_training)
    means, places = here.sum(means), here.sum(places) / count
    stderr = (means.std() / math.sqrt(count)).item() if count > 1 else None
    ranges = [(low, high, places[low:high].mean().item()) for low, high in itertools.pairwise(edges) if low < high]
    losses = [round(loss, 6) for loss in means.tolist()]
    return LengthLoss(length, means.mean().item(), stderr, count, ranges, losses)
