"""Where a model's attention goes, on real text: the quantities of figure 1, for every layer and head.

The queries are a sample from the last eighth of each window, so that all of them see almost the whole context. The
first token is an attention sink and an outlier: its share is reported separately, and everything else describes the
distribution over the other keys, renormalised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from scaleinv.analysis.capture import Layer, blocks_of, capture, model_name, windows_of
from scaleinv.analysis.figures import Progress
from scaleinv.analysis.ranges import Range, range_sums
from scaleinv.files import UnreadableFile, read_object, write_data

RECENT = 100
"""How many of the most recent tokens `recent_share` counts."""

REMAKE = "`scaleinv analyze model` writes it again"
"""What to do about a damaged file."""


@dataclasses.dataclass(frozen=True)
class LengthStatistics:
    """One context length N: means over queries and windows, float64 ``[layers, heads]``. Entropies are in nats.

    For keys that no query sees (beyond a sliding window) a quantity is NaN, and a share is 0.
    """

    length: int
    windows: int
    queries: int
    """In each window."""
    entropy: Tensor
    """Of the whole distribution."""
    far_entropy: Tensor
    """Inside the farthest range, [N/ratio, N)."""
    recent_share: Tensor
    """Attention on the most recent tokens, of 1."""
    sink_share: Tensor
    """Share of all attention that the first token takes, together with a learned sink if the model has one."""
    ranges: tuple[Range, ...]
    """R ranges of distances: the token itself, then decades."""
    range_share: Tensor
    """``[layers, heads, R]``: attention on each range; they sum to 1."""
    range_entropy: Tensor
    """``[layers, heads, R]``."""


@dataclasses.dataclass(frozen=True)
class ModelStatistics:
    """A model at several context lengths; `model_statistics` makes it."""

    file: ClassVar[str] = "attention"
    model: str
    """The model's name."""
    layers: tuple[int, ...]
    """The layers that have attention, as the model numbers them."""
    lengths: tuple[LengthStatistics, ...]
    ratio: int
    recent: int

    def at(self, length: int) -> LengthStatistics:
        """The statistics at one context length."""
        found = {entry.length: entry for entry in self.lengths}
        if length not in found:
            raise ValueError(f"length must be one of {', '.join(map(str, found))}, got {length}")
        return found[length]

    def save(self, folder: Path) -> list[Path]:
        """Write ``attention.csv``, one line per length, layer, head and range, and ``attention.json``."""
        return write_data(folder, self.file, self._rows(), listed(self))

    @classmethod
    def load(cls, path: Path) -> ModelStatistics:
        """Read what `save` wrote, from the folder or from ``attention.json`` itself."""
        path = Path(path) / f"{cls.file}.json" if Path(path).is_dir() else Path(path)
        values = read_object(path, REMAKE)
        try:
            entries = tuple(LengthStatistics(**_restored(entry)) for entry in values["lengths"])
            found = cls(values["model"], tuple(values["layers"]), entries, values["ratio"], values["recent"])
            for entry in entries:
                _check_shapes(entry, len(found.layers))
            return found
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise UnreadableFile(path, f"holds no statistics of a model: {error!r}", REMAKE) from error

    def _rows(self) -> Iterator[dict[str, Any]]:
        for entry in self.lengths:
            far, recent = (entry.length // self.ratio, entry.length), (0, self.recent)
            for row, layer in enumerate(self.layers):
                for head in range(entry.entropy.shape[1]):
                    decades = zip(
                        entry.ranges, entry.range_share[row, head], entry.range_entropy[row, head], strict=True
                    )
                    for kind, (start, stop), share, entropy in (
                        ("whole", (0, entry.length), 1.0, entry.entropy[row, head]),
                        ("far", far, None, entry.far_entropy[row, head]),
                        ("recent", recent, entry.recent_share[row, head], None),
                        *(("decade", *decade) for decade in decades),
                        ("first token", (None, None), entry.sink_share[row, head], None),
                    ):
                        yield {
                            **{"model": self.model, "length": entry.length, "layer": layer, "head": head},
                            **{"range": kind, "start": start, "stop": stop},
                            **{"share": listed(share), "entropy": listed(entropy)},
                        }


def model_statistics(
    model: nn.Module,
    tokens: Tensor | Sequence[int],
    lengths: Sequence[int],
    *,
    name: str | None = None,
    windows: int = 4,
    queries: int = 64,
    recent: int = RECENT,
    ratio: int = 10,
    bos: int | None = None,
    block: int | None = None,
    progress: Progress | None = None,
) -> ModelStatistics:
    """Entropies and shares of a model's attention on real text, at several context lengths.

    Args:
        model: our `GPT` (its own logit transform is used) or a Hugging Face causal language model, converted or not.
        tokens: a text, ``[T]``; every length takes its first windows.
        lengths: context lengths N in tokens, above ``recent``.
        name: for legends and files; None for the model's method or path.
        windows: windows at each length, or as many as the text has.
        queries: positions in each window, spread evenly over its last eighth.
        bos: a token to put before each window, for models that always saw one there.
        block: queries at a time; None for what keeps memory small.
        progress: called with one line of text before each window.

    >>> from scaleinv.model import GPT, GPTConfig
    >>> model = GPT(GPTConfig(layers=1, width=32, heads=2, method="nope"))
    >>> found = model_statistics(model, torch.arange(256) % 7, [128, 256]).at(256)
    >>> found.ranges
    ((0, 1), (1, 10), (10, 100), (100, 256))
    >>> found.entropy.shape
    torch.Size([1, 2])
    """
    check_lengths(lengths, recent)
    if queries < 1:
        raise ValueError(f"queries must be at least 1, got {queries}")
    name = name or model_name(model)
    layers: tuple[int, ...] = ()
    entries = []
    for length in lengths:
        positions, decades = last_positions(length, queries), _decades(length)
        collector = _Collector(positions, [(0, length), (length // ratio, length), (0, recent), *decades], block)
        texts = list(windows_of(tokens, length, windows, bos))
        for number, text in enumerate(texts, 1):
            if progress:
                progress(f"attention: {name}, {length:,} tokens, window {number} of {len(texts)}")
            capture(model, text, collector.add)
        if not collector.found:
            raise ValueError(f"model {name} has no layer with softmax attention")
        layers = tuple(sorted(collector.found))
        entropy, share, sink = (collector.mean(layers, item) for item in range(3))
        entries.append(
            LengthStatistics(
                length=length,
                windows=len(texts),
                queries=positions.numel(),
                entropy=entropy[..., 0],
                far_entropy=entropy[..., 1],
                recent_share=share[..., 2],
                sink_share=sink,
                ranges=decades,
                range_share=share[..., 3:],
                range_entropy=entropy[..., 3:],
            )
        )
    return ModelStatistics(name, layers, tuple(entries), ratio, recent)


def check_lengths(lengths: Sequence[int], recent: int = RECENT) -> None:
    """Raise ValueError unless there are lengths, all longer than the most recent tokens."""
    if not lengths or min(lengths) <= recent:
        raise ValueError(f"lengths must exceed recent={recent}, got {list(lengths)}")


def last_positions(length: int, count: int) -> Tensor:
    """Up to ``count`` positions, spread evenly over the last eighth of ``length`` tokens, the very last included."""
    first = length - max(length // 8, 1)
    return spread(first, length - 1, count)


def spread(first: int, last: int, count: int) -> Tensor:
    """Up to ``count`` of the integers first … last, evenly spaced, the last included.

    >>> spread(0, 9, 4).tolist(), spread(0, 9, 1).tolist(), spread(7, 9, 5).tolist()
    ([0, 3, 6, 9], [9], [7, 8, 9])
    """
    steps = torch.linspace(last, first, min(count, last - first + 1), dtype=torch.float64)
    return steps.flip(0).round().to(torch.int64)


def listed(content: Any) -> Any:
    """A dataclass with its tensors as lists, in its fields and in those of dataclasses inside, for `write_data`."""
    if isinstance(content, Tensor):
        return content.tolist()
    if isinstance(content, tuple):
        return tuple(map(listed, content))
    if not dataclasses.is_dataclass(content) or isinstance(content, type):
        return content
    values = {field.name: listed(getattr(content, field.name)) for field in dataclasses.fields(content)}
    return dataclasses.replace(content, **values)


def _restored(entry: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `LengthStatistics` from JSON, in which NaN is null."""

    def numbers(value: Any) -> Any:
        return [numbers(item) for item in value] if isinstance(value, list) else torch.nan if value is None else value

    ranges = tuple((start, stop) for start, stop in entry["ranges"])
    tensors = {name: numbers(value) for name, value in entry.items() if isinstance(value, list) and name != "ranges"}
    return {
        **entry,
        "ranges": ranges,
        **{name: torch.tensor(value, dtype=torch.float64) for name, value in tensors.items()},
    }


def _check_shapes(entry: LengthStatistics, layers: int) -> None:
    """Raise ValueError unless all tensors have the same layers, heads and ranges."""
    heads = entry.entropy.shape[-1]
    for name in ("entropy", "far_entropy", "recent_share", "sink_share", "range_share", "range_entropy"):
        shape = [layers, heads, len(entry.ranges)][: 3 if name.startswith("range_") else 2]
        found = list(getattr(entry, name).shape)
        if found != shape:
            raise ValueError(f"{name} at {entry.length} tokens must have shape {shape}, got {found}")


class _Collector:
    """Takes layers and keeps each query's entropies and shares of ``ranges``, the whole context first."""

    def __init__(self, positions: Tensor, ranges: list[Range], block: int | None) -> None:
        self.positions, self.ranges, self.block = positions, ranges, block
        self.found: dict[int, list[tuple[Tensor, ...]]] = {}

    def add(self, layer: Layer) -> None:
        for part in blocks_of(self.positions, layer, self.block):
            self.found.setdefault(layer.index, []).append(self._measure(layer, part))

    def _measure(self, layer: Layer, positions: Tensor) -> tuple[Tensor, ...]:
        """Entropies and shares ``[H, queries, ranges]`` and what the sinks take ``[H, queries]``."""
        logits = layer.logits(positions)
        first = positions[:, None].expand(*logits.shape[:3], 1)  # the first token's distance is the position
        sink = logits.gather(-1, first)[..., 0]
        sums = range_sums(logits.scatter_(-1, first, -torch.inf), self.ranges)
        if layer.sinks is not None:
            sink = torch.logaddexp(sink, layer.sinks.to(sink)[:, None])
        taken = torch.sigmoid(sink - sums.log_total[..., 0])
        return tuple(values.transpose(0, 1).flatten(1, 2).cpu() for values in (sums.entropy, sums.share(0), taken))

    def mean(self, layers: tuple[int, ...], item: int) -> Tensor:
        """The mean over queries ``[layers, heads, …]``; a query that sees nothing of a range does not count there."""
        rows = [torch.cat([part[item] for part in self.found[layer]], 1).nanmean(1) for layer in layers]
        if len({row.shape for row in rows}) > 1:
            raise ValueError(f"model must have equally many heads in all layers, got {[row.shape[0] for row in rows]}")
        return torch.stack(rows)


def _decades(length: int) -> tuple[Range, ...]:
    """The token itself, then [1, 10), [10, 100), … up to ``length``."""
    starts = [1]
    while 10 * starts[-1] < length:
        starts.append(10 * starts[-1])
    return (0, 1), *((start, min(10 * start, length)) for start in starts)
