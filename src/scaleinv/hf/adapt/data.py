"""Text and shards as a model's own tokens.

Vocabularies of pretrained models do not fit into the uint16 of shards, so tokenised text is kept as uint32, in one file
per split. It is tokenised once, split by whole documents and ordered as `scaleinv.data.prepare` does it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from scaleinv.data import TokenData
from scaleinv.data.cache import replace_folder, temporary_folder
from scaleinv.data.corpus import check_apart, held_out, shard_paths
from scaleinv.data.documents import fingerprint
from scaleinv.data.prepare import Entry, placed, split_documents
from scaleinv.data.tokens import combined_hash
from scaleinv.files import UnreadableFile, read_object, write_json
from scaleinv.machine import cache_folder
from scaleinv.progress import Progress, Report, silent

VAL_FRACTION = 0.1
META = "meta.json"
_CHUNK = 1 << 20  # characters tokenised together


class ModelTokens(TokenData):
    """One split of tokenised text: a .npy file of uint32, read through a memory map."""

    def __init__(self, path: Path, end_of_text: int) -> None:
        self._tokens = np.load(path, mmap_mode="r")
        self.sha256 = hashlib.sha256(self._tokens.data).hexdigest()
        self.paths, self.end_of_text, self.hashes, self.total = [path], end_of_text, [self.sha256], len(self._tokens)

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start … start + count - 1, uint32."""
        if start < 0 or count < 0 or start + count > self.total:
            raise ValueError(f"start and count must lie inside {self.total} tokens, got {start} and {count}")
        return np.array(self._tokens[start : start + count])


class Splits(NamedTuple):
    """Tokens to train on, and tokens to evaluate on."""

    train: TokenData
    val: TokenData

    @property
    def sha256(self) -> str:
        return combined_hash(split.sha256 for split in self)


def load_splits(
    data: str,
    val_data: str | None,
    tokenizer: Any,
    vocabulary: int,
    *,
    cache: Path | None = None,
    progress: Progress = silent,
) -> Splits:
    """Training and held-out tokens of a model, from text or from shards of its own tokens.

    Args:
        data, val_data: as in `scaleinv.data.load_corpus`.
        tokenizer: of transformers.
        vocabulary: ids that the model has; ValueError if a token lies beyond it.
        cache: folder; by default ``adapt`` in `scaleinv.machine.cache_folder`.
    """
    cache = cache_folder() / "adapt" if cache is None else cache
    shards, val_shards = shard_paths(data), shard_paths(val_data) if val_data else None
    if val_data:
        check_apart(data, shards, val_data, val_shards)
    start = document_start(tokenizer)

    def of_shards(paths: list[Path]) -> TokenData:
        return TokenData(paths, start, vocab_size=vocabulary, cache=cache / "scans")

    def of_text(text: str, val_fraction: float) -> dict[str, TokenData]:
        return _tokenised(text, tokenizer, start, vocabulary, val_fraction, cache, progress)

    if shards is None:
        found = of_text(data, 0.0 if val_data else VAL_FRACTION)
        train, val = found["train"], found.get("val")
    else:
        paths, rest = (shards, []) if val_data else held_out(data, shards)
        train, val = of_shards(paths), of_shards(rest) if rest else None
    if val_data:
        val = of_text(val_data, 0.0)["train"] if val_shards is None else of_shards(val_shards)
    assert val is not None
    if train.sha256 == val.sha256:
        raise ValueError(f"val_data {val_data!r} must be another text than data, got a copy of it")
    return Splits(train, val)


def document_start(tokenizer: Any) -> int:
    """The id before each document: the beginning of a text, or where a tokenizer has none, the end of one."""
    for name in ("bos_token_id", "eos_token_id"):
        found = getattr(tokenizer, name, None)
        if found is not None:
            return int(found)
    raise ValueError("the model's tokenizer has neither a beginning nor an end of text to put between documents")


class Windows(Dataset):
    """Windows of the training text in their random order, as `Trainer` wants them: the labels are the inputs.

    Item n is the n-th window of the seed's order after ``first``, whatever the number of ranks; they begin again after
    the last.
    """

    def __init__(self, data: TokenData, length: int, count: int, seed: int, first: int = 0) -> None:
        self.data, self.length, self.count, self.seed, self.first = data, length, count, seed, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        inputs, _ = self.data.batch(self.first + index, 1, self.length, seed=self.seed)
        return {"input_ids": inputs[0], "labels": inputs[0]}


def _tokenised(
    text: str, tokenizer: Any, start: int, vocabulary: int, val_fraction: float, cache: Path, progress: Progress
) -> dict[str, TokenData]:
    """The splits of a text, from the cache if they are there."""
    key = json.dumps([1, fingerprint(text), _identity(tokenizer), start, val_fraction])
    folder = cache / hashlib.sha256(key.encode()).hexdigest()[:32]
    try:
        return _opened(folder, start, vocabulary)
    except UnreadableFile:  # missing or damaged: made again
        pass
    with temporary_folder(cache) as made:
        _write(text, tokenizer, start, val_fraction, made, progress)
        replace_folder(folder, made)
    return _opened(folder, start, vocabulary)


def _opened(folder: Path, start: int, vocabulary: int) -> dict[str, TokenData]:
    meta = read_object(folder / META)
    found: dict[str, TokenData] = {}
    splits = meta.get("splits")
    for split, known in splits.items() if isinstance(splits, dict) else ():
        path = folder / f"{split}.npy"
        try:
            found[split] = ModelTokens(path, start)
            whole, highest = found[split].sha256 == known["sha256"], int(known["highest"])
        except (OSError, ValueError, EOFError, KeyError, TypeError) as error:
            raise UnreadableFile(path, f"cannot be read ({error})") from error
        if not whole:
            raise UnreadableFile(path, "does not hold the tokens that were written")
        if highest >= vocabulary:
            raise ValueError(
                f"the tokenizer gives id {highest}, but the model has {vocabulary:,} ids: they do not belong together"
            )
    if not found:
        raise UnreadableFile(folder / META, "names no split")
    return found


def _write(text: str, tokenizer: Any, start: int, val_fraction: float, folder: Path, progress: Progress) -> None:
    """One pass spools tokens to disk, a second writes each split in its order."""
    index: list[Entry] = []
    spool, place = folder / "spool", 0
    with spool.open("wb") as file:
        for item, ids in _encoded(placed(text, val_fraction), tokenizer):
            np.array([start, *ids], dtype="<u4").tofile(file)
            index.append(Entry(item.place, item.order, place, 1 + len(ids)))
            place += 1 + len(ids)
            if len(index) % 1000 == 0:
                words = f"tokenised {len(index):,} documents, {place:,} tokens"
                progress(Report(words, passing=True, kind="tokenised", documents=len(index), tokens=place))
    tokens = np.memmap(spool, dtype="<u4", mode="r")
    splits = {}
    for split, entries in split_documents(index, val_fraction).items():
        total = sum(entry.size for entry in entries)
        whole = np.lib.format.open_memmap(folder / f"{split}.npy", mode="w+", dtype="<u4", shape=(total,))
        place = 0
        for entry in entries:
            whole[place : place + entry.size] = tokens[entry.start : entry.start + entry.size]
            place += entry.size
        whole.flush()
        digest = hashlib.sha256(whole.data).hexdigest()
        splits[split] = {"tokens": total, "highest": int(whole.max()), "sha256": digest}
    del tokens
    spool.unlink()
    write_json(folder / META, {"text": text, "splits": splits})


def _encoded(items: Iterator[Any], tokenizer: Any) -> Iterator[tuple[Any, list[int]]]:
    """Each document with its ids."""
    while chunk := list(itertools.islice(items, 64)):
        texts = [item.document.text for item in chunk]
        if sum(map(len, texts)) <= _CHUNK:
            yield from zip(chunk, _ids(tokenizer, texts), strict=True)
        else:  # long documents one by one: their tokens are Python integers
            yield from ((item, _ids(tokenizer, [text])[0]) for item, text in zip(chunk, texts, strict=True))


def _ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Ids of texts; one that spells a special token is only text."""
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    return tokenizer(texts, split_special_tokens=True, **options)["input_ids"]


def _identity(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = repr(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    return hashlib.sha256(described.encode()).hexdigest()
