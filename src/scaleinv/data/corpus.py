"""A corpus: training and validation tokens from any text or shards, tokenised once and kept in a cache."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from scaleinv.data.cache import prepared
from scaleinv.data.documents import find_files, sources, split_spec
from scaleinv.data.tokenizers import Tokenizer, get_tokenizer
from scaleinv.data.tokens import TokenData, combined_hash
from scaleinv.machine import cache_folder


@dataclass
class Corpus:
    """Training and validation tokens, and what they mean."""

    train: TokenData
    val: TokenData
    tokenizer: Tokenizer
    vocab_size: int
    """Ids that may occur: the tokenizer's, or what `load_corpus` was told."""
    sha256: str
    description: str


def load_corpus(
    data: str,
    val_data: str | None = None,
    *,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    val_fraction: float = 0.1,
    cache: Path | None = None,
    min_length: int = 0,
) -> Corpus:
    """Training and validation tokens from text or shards.

    Text is tokenised once, into a folder of ``cache`` that is reused as long as the files' names, sizes and times stay
    the same; a Hugging Face dataset is kept for good. A damaged folder is made again. Several processes may do this at
    the same time.

    Args:
        data: a corpus of text (see `scaleinv.data.documents`); or shards: a glob, a folder or a comma-separated list.
        val_data: the same for validation; a file of ``data``, or a copy of all of it, raises ValueError. Without it,
            text is split by whole documents (see `scaleinv.data.prepare`), and shards called ``…_val_<number>.bin``
            are held out, or else the last shard.
        tokenizer: see `get_tokenizer`. None means bytes for text; for shards the tokenizer saved beside them, or else
            GPT-2's, as in llm.c.
        vocab_size: ids that the model has, at least the tokenizer's; None for the tokenizer's.
        val_fraction: share of the documents held out if there is no ``val_data``.
        cache: folder; by default ``data`` in `scaleinv.machine.cache_folder`.
        min_length: the longest window wanted; a split of fewer than ``min_length + 1`` tokens raises ValueError.
    """
    cache = cache_folder() / "data" if cache is None else Path(cache)
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction must lie between 0 and 1, got {val_fraction}")
    shards, val_shards = shard_paths(data), shard_paths(val_data) if val_data else None
    if val_data:
        check_apart(data, shards, val_data, val_shards)
    if shards is None:
        made = prepared(data, tokenizer or "bytes", 0.0 if val_data else val_fraction, cache)
        train = [path for path in made.shards if not _is_val(path)]
        val = [path for path in made.shards if _is_val(path)]
        tokenizer = str(made.folder)
        note = "one document, cut in two for validation" if made.cut else ""
    else:
        train, val = (shards, []) if val_data else held_out(data, shards)
        tokenizer = tokenizer or _tokenizer_beside(train[0])
        note = f"validation on {', '.join(path.name for path in val)}" if val else ""
    if val_data:
        val = val_shards or prepared(val_data, tokenizer, 0.0, cache).shards
        note = f"validation on {val_data}"
    meaning = get_tokenizer(tokenizer)
    vocabulary = meaning.vocab_size if vocab_size is None else vocab_size
    if vocabulary < meaning.vocab_size:
        raise ValueError(
            f"vocab_size must be at least {meaning.vocab_size}, the {meaning.name} tokenizer's, got {vocabulary}"
        )
    splits = [
        TokenData(paths, meaning.end_of_text, vocab_size=vocabulary, cache=cache / "scans") for paths in (train, val)
    ]
    if val_data and not set(splits[0].hashes).isdisjoint(splits[1].hashes):
        raise ValueError(f"val_data {val_data!r} must be another text than data, got a copy of it")
    for name, source, split in zip(("train", "validation"), (data, val_data or data), splits, strict=True):
        if split.total < min_length + 1:
            raise ValueError(
                f"data {source!r}: the {name} split has {split.total:,} tokens, shorter than one window: "
                f"length {min_length:,} needs {min_length + 1:,}"
            )
    counts = f"{splits[0].total:,} {meaning.name} tokens to train on, {splits[1].total:,} to validate"
    return Corpus(
        train=splits[0],
        val=splits[1],
        tokenizer=meaning,
        vocab_size=vocabulary,
        sha256=combined_hash(split.sha256 for split in splits),
        description=f"{data}: {counts}" + (f"; {note}" if note else ""),
    )


def shard_paths(spec: str) -> list[Path] | None:
    """The shards that a spec names, in its order; None if it names text."""
    shards: list[Path] = []
    text: list[str] = []
    for part in split_spec(spec):
        found = find_files(part)
        if not found and part.endswith(".bin"):
            raise ValueError(f"data {part!r} matches no file")
        if len(found) == 1 and found[0].is_dir():
            found = sorted(found[0].glob("*.bin"))
        bins = [path for path in found if path.suffix == ".bin"]
        shards += bins
        if not bins or len(bins) < len(found):
            text.append(part)
    if shards and text:
        raise ValueError(f"data {spec!r} must be token shards or text, not both; {text[0]!r} is not only shards")
    return list(dict.fromkeys(shards)) or None


def check_apart(data: str, shards: list[Path] | None, val_data: str, val_shards: list[Path] | None) -> None:
    """Raise ValueError if a file is in both."""
    if (shards is None) != (val_shards is None):
        return
    train, val = (
        sources(spec) if paths is None else {str(path.resolve()) for path in paths}
        for spec, paths in ((data, shards), (val_data, val_shards))
    )
    if train & val:
        raise ValueError(f"val_data {val_data!r} must hold nothing of data, got {min(train & val)} in both")


def _is_val(path: Path) -> bool:
    return re.fullmatch(r".*_val_\d+", path.stem) is not None


def held_out(data: str, shards: list[Path]) -> tuple[list[Path], list[Path]]:
    """Shards to train on and to validate on: those whose names say so, or else the last."""
    val = [path for path in shards if _is_val(path)] or shards[-1:]
    train = [path for path in shards if path not in val]
    if not train:
        raise ValueError(f"data {data!r}: val_data must be given, or no shard but {val[0].name} is left to train on")
    return train, val


def _tokenizer_beside(shard: Path) -> str:
    return str(shard.parent) if (shard.parent / "tokenizer.json").exists() else "gpt2"
