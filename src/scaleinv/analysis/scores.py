"""Are a model's scores Gaussian, with variance 1? Moments and quantiles of S = q·k/√d, with and without the rotary.

The theory assumes this (Theorem 1), and QK-norm provides the variance. The scores are those of a sample of queries,
spread evenly over each window, with all keys that they see except the first, an outlier. Moments are exact over these
pairs; quantiles, for QQ-plots (figures 9 – 14), are those of a bounded random sample of them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from scaleinv.analysis.capture import Layer, blocks_of, capture, model_name, training_length, windows_of
from scaleinv.analysis.figures import Progress
from scaleinv.analysis.model import listed, spread
from scaleinv.files import write_data

logger = logging.getLogger(__name__)

NORMAL = tuple(step / 10 for step in range(-30, 31))
"""The quantiles of a Gaussian at which those of the scores are taken: -3 … 3."""

UNIT = (0.5, 2.0)
"""A variance outside this range counts as far from 1."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """The distribution of the scores in every head, float64 ``[layers, heads]``; NaN in layers that do not show it."""

    mean: Tensor
    variance: Tensor
    skew: Tensor
    kurtosis: Tensor
    """Excess: 0 for a Gaussian."""
    quantiles: Tensor
    """``[layers, heads, P]``, at the probabilities of `NORMAL`."""

    @property
    def far_from_unit(self) -> Tensor:
        """Heads whose variance is outside of `UNIT`, bool ``[layers, heads]``."""
        return (self.variance < UNIT[0]) | (self.variance > UNIT[1])


@dataclasses.dataclass(frozen=True)
class ScoreStatistics:
    """The scores of a model; `score_statistics` makes it."""

    file: ClassVar[str] = "scores"
    model: str
    """The model's name."""
    length: int
    windows: int
    pairs: int
    """Query-key pairs in each head (of a layer without a sliding window), over all windows."""
    layers: tuple[int, ...]
    rotary: Scores
    """As attention sees them."""
    without_rotary: Scores | None
    """Before the rotary embedding; None if no layer shows it."""
    normal: tuple[float, ...]
    """The Gaussian's quantiles, `NORMAL`."""
    warnings: tuple[str, ...]
    """Where the assumptions of the theory fail."""

    def save(self, folder: Path) -> list[Path]:
        """Write ``scores.csv``, one line per head, with and without the rotary, and ``scores.json``."""
        return write_data(folder, self.file, self._rows(), listed(self))

    def _rows(self) -> Iterator[dict[str, Any]]:
        for kind, scores in (("with", self.rotary), ("without", self.without_rotary)):
            if scores is None:
                continue
            for row, layer in enumerate(self.layers):
                for head in range(scores.mean.shape[1]):
                    values = {
                        item: getattr(scores, item)[row, head].item()
                        for item in ("mean", "variance", "skew", "kurtosis")
                    }
                    quantiles = zip(self.normal, scores.quantiles[row, head].tolist(), strict=True)
                    yield {
                        **{"model": self.model, "rotary": kind, "layer": layer, "head": head, **values},
                        **{f"quantile {normal:+.1f}": value for normal, value in quantiles},
                    }


def score_statistics(
    model: nn.Module,
    tokens: Tensor | Sequence[int],
    length: int | None = None,
    *,
    name: str | None = None,
    windows: int = 4,
    queries: int | None = 256,
    kept: int = 1 << 14,
    seed: int = 0,
    bos: int | None = None,
    block: int | None = None,
    progress: Progress | None = None,
) -> ScoreStatistics:
    """Moments and quantiles of a model's scores on real text, for every layer and head.

    Warns, through `logging` and in the result, if the variance is far from 1.

    Args:
        model: our `GPT`, or a Hugging Face causal language model.
        tokens: a text, ``[T]``.
        length: tokens in a window; None for the training length, or the whole text if that is shorter.
        windows: windows of the text, or as many as it has.
        queries: positions in each window; None for all.
        kept: pairs in each head whose scores are kept for the quantiles.
        seed: of the choice of these pairs.

    ``name``, ``bos``, ``block`` and ``progress`` are those of `model_statistics`.
    """
    if length is None:
        length = min(training_length(model), len(tokens))
    if length < 3:
        raise ValueError(f"length must be at least 3, got {length}")
    if queries is not None and queries < 1:
        raise ValueError(f"queries must be at least 1, got {queries}")
    texts = list(windows_of(tokens, length, windows, bos))
    if kept < len(texts):
        raise ValueError(f"kept must be at least 1 for each of {len(texts)} windows, got {kept}")
    name = name or model_name(model)
    positions = spread(1, length - 1, queries or length)
    generator = torch.Generator().manual_seed(seed)
    pairs: dict[int | None, _Pairs] = {}  # by sliding window; layers and windows of the text share them
    found: tuple[dict[int, _Sample], dict[int, _Sample]] = {}, {}

    def consume(layer: Layer) -> None:
        if layer.window not in pairs:
            pairs[layer.window] = _Pairs(positions, layer.window, kept // len(texts), generator)
        for samples, rotary in zip(found, (True, False), strict=True):
            if rotary or layer.unrotated is not None:
                sample = samples.setdefault(layer.index, _Sample())
                for rows in blocks_of(torch.arange(len(positions)), layer, block):
                    sample.add(layer, pairs[layer.window], rows.cpu(), rotary)

    for number, text in enumerate(texts, 1):
        if progress:
            progress(f"scores: {name}, {length:,} tokens, window {number} of {len(texts)}")
        capture(model, text, consume)
    if not found[0]:
        raise ValueError(f"model {name} has no layer with softmax attention")
    layers = tuple(sorted(found[0]))
    rotary = _gather(layers, found[0])
    warnings = _warnings(name, layers, rotary)
    for warning in warnings:
        logger.warning(warning)
    without = _gather(layers, found[1]) if found[1] else None
    total = int(positions.sum()) * len(texts)
    return ScoreStatistics(name, length, len(texts), total, layers, rotary, without, NORMAL, warnings)


class _Pairs:
    """The pairs of one window: queries at ``positions`` with the keys that they see, except the first."""

    def __init__(self, positions: Tensor, window: int | None, kept: int, generator: torch.Generator) -> None:
        self.positions = positions
        self.low = (positions + 1 - window).clamp_min(1) if window else torch.ones_like(positions)  # first key counted
        until = (positions - self.low + 1).cumsum(0)
        total = int(until[-1])
        if total <= 8 * kept:
            flat = torch.randperm(total, generator=generator)[:kept]
        else:  # so few of so many: a repeated pair hardly matters
            flat = torch.randint(total, (kept,), generator=generator)
        flat = flat.sort().values
        self.rows = torch.searchsorted(until, flat, right=True)
        self.keys = positions[self.rows] - (until[self.rows] - 1 - flat)


class _Sample:
    """Sums of powers, and the scores kept, of all heads of a layer. Powers are about a pivot near the mean."""

    def __init__(self) -> None:
        self.count = 0
        self.pivot: Tensor | None = None
        self.powers: Tensor | float = 0.0
        self.kept: list[Tensor] = []

    def add(self, layer: Layer, pairs: _Pairs, rows: Tensor, rotary: bool) -> None:
        """Take the queries numbered ``rows``, which follow on one another."""
        positions, low = pairs.positions[rows], pairs.low[rows]
        scores = layer.scores(positions.to(layer.query.device), rotary)[0]  # [H, R, N]
        first, last = (int(torch.searchsorted(pairs.rows, rows[end], right=end == -1)) for end in (0, -1))
        row, column = pairs.rows[first:last] - rows[0], pairs.keys[first:last]
        self.kept.append(scores[:, row.to(scores.device), column.to(scores.device)].to("cpu", torch.float32))
        key = torch.arange(layer.length)
        seen = ((key >= low[:, None]) & (key <= positions[:, None])).to(scores.device)
        self.count += int(seen.sum())
        x = scores.to(torch.float64)
        if self.pivot is None:
            self.pivot = torch.where(seen, x, 0.0).sum((1, 2), keepdim=True) / seen.sum()
        x = torch.where(seen, x - self.pivot, 0.0).flatten(1)
        square = x.square()
        sums = (x.sum(1), square.sum(1), torch.linalg.vecdot(x, square), torch.linalg.vecdot(square, square))
        self.powers = self.powers + torch.stack(sums)

    def result(self) -> tuple[Tensor, ...]:
        """Mean, variance, skew, excess kurtosis ``[H]`` and quantiles ``[H, P]``."""
        assert self.pivot is not None
        m1, m2, m3, m4 = torch.as_tensor(self.powers / self.count)
        variance = m2 - m1.square()
        third = m3 - 3 * m1 * m2 + 2 * m1**3
        fourth = m4 - 4 * m1 * m3 + 6 * m1.square() * m2 - 3 * m1**4
        probabilities = torch.special.ndtr(torch.tensor(NORMAL, dtype=torch.float64))
        quantiles = torch.cat(self.kept, 1).to(torch.float64).quantile(probabilities, dim=1).T
        moments = (self.pivot.flatten() + m1, variance, third / variance**1.5, fourth / variance.square() - 3)
        return *(moment.cpu() for moment in moments), quantiles


def _gather(layers: tuple[int, ...], samples: dict[int, _Sample]) -> Scores:
    results = {layer: sample.result() for layer, sample in samples.items()}
    if len({result[0].shape for result in results.values()}) > 1:
        heads = [len(result[0]) for result in results.values()]
        raise ValueError(f"model must have the same number of heads in all layers, got {heads}")
    blank = tuple(torch.full_like(part, torch.nan) for part in next(iter(results.values())))
    rows = [results.get(layer, blank) for layer in layers]
    return Scores(*(torch.stack(parts) for parts in zip(*rows, strict=True)))


def _warnings(name: str, layers: tuple[int, ...], scores: Scores) -> tuple[str, ...]:
    far = scores.far_from_unit
    if not bool(far.any()):
        return ()
    row, head = divmod(int((scores.variance.log().abs()).argmax()), far.shape[1])
    return (
        f"{name}: the variance of the scores is far from 1 in {int(far.sum())} of {far.numel()} heads "
        f"({scores.variance[row, head].item():.3g} in layer {layers[row]}, head {head}), where the theory takes it to "
        "be 1; a conversion should use the factors of scaleinv.analysis.calibrate",
    )
