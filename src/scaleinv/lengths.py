"""Context lengths as people write them: ``4x`` of the training length, or ``2048`` tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def parse(lengths: str | Sequence[str | int], train_length: int | None) -> dict[str, int]:
    """Lengths in tokens by their labels, in the order given; ``"1x,4x"`` or ``["1x", 2048]``.

    Raises ValueError if a length does not read like ``4x``, ``0.5x`` or ``2048``, is less than one token, or is a
    multiple while the training length is unknown (None).

    >>> parse("0.5x, 4x, 100", 512)
    {'0.5x': 256, '4x': 2048, '100': 100}
    """
    words = lengths.split(",") if isinstance(lengths, str) else [str(length) for length in lengths]
    found = {}
    for word in words:
        label = word.strip().lower()
        number, is_multiple = _number(label)
        if is_multiple and train_length is None:
            raise ValueError(f"lengths: {label!r} is a multiple of the training length, which is unknown; use tokens")
        tokens = round(number * train_length) if is_multiple and train_length is not None else round(number)
        if tokens < 1:
            raise ValueError(f"lengths must be at least one token, got {label!r}")
        found[label] = tokens
    if not found:
        raise ValueError("lengths must name at least one length, got none")
    return found


def multiple(label: str, train_length: int | None) -> float:
    """A label as a multiple of the training length: ``"4x"`` is 4, and so is ``"2048"`` at 512 tokens."""
    number, is_multiple = _number(label)
    if is_multiple:
        return number
    if train_length is None:
        raise ValueError(f"lengths: {label!r} is in tokens, so train_length must say what 1x is")
    return number / train_length


def ordered(labels: Iterable[str], train_length: int | None) -> list[str]:
    """Each label once, shortest first."""
    return sorted(dict.fromkeys(labels), key=lambda label: multiple(label, train_length))


def label(key: str, train_length: int | None = None) -> str:
    """A label for people: ``"4x"`` is 4×, or 4× (16k) where the training length is given; ``"2048"`` is 2k tokens."""
    number, is_multiple = _number(key)
    if not is_multiple:
        return f"{tokens_label(number)} tokens"
    tokens = f" ({tokens_label(number * train_length)})" if train_length else ""
    return f"{number:g}×{tokens}"


def tokens_label(tokens: float) -> str:
    """A count of tokens, abbreviated.

    >>> tokens_label(512), tokens_label(4096), tokens_label(1 << 20)
    ('512', '4k', '1M')
    """
    for unit, name in ((2**20, "M"), (2**10, "k")):
        if tokens >= unit and tokens % unit == 0:
            return f"{tokens / unit:.0f}{name}"
    return f"{tokens:,.0f}"


def _number(label: str) -> tuple[float, bool]:
    """The number of a label, and whether it is a multiple of the training length."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)(x?)", label)
    if found is None or float(found[1]) == 0 or ("." in label and not found[2]):
        raise ValueError(f"lengths must read like 4x (of the training length) or 2048 (tokens), got {label!r}")
    return float(found[1]), bool(found[2])
