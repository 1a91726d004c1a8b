"""The shard reader refuses every damaged file, and names it; the writer never leaves half a shard."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaleinv.data.shards import HEADER_BYTES, open_shard, scan_shard, write_shard

TOKENS = np.arange(50, dtype=np.uint16)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("shards") / "whole.bin"
    write_shard(path, TOKENS)
    return path.read_bytes()


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards") / "damaged.bin"


def test_format_is_that_of_llm_c(whole: bytes) -> None:
    header = np.frombuffer(whole[:HEADER_BYTES], dtype="<i4")
    assert header[:3].tolist() == [20240520, 1, 50]
    assert not header[3:].any()
    assert np.frombuffer(whole[HEADER_BYTES:], dtype="<u2").tolist() == TOKENS.tolist()


@settings(max_examples=30, deadline=None)
@given(tokens=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=300))
def test_round_trip(tokens: list[int], damaged: Path) -> None:
    write_shard(damaged, np.array(tokens))
    read = open_shard(damaged)
    assert read.dtype == np.uint16
    assert read.tolist() == tokens
    assert not read.flags.writeable


@settings(max_examples=60, deadline=None)
@given(size=st.integers(0, HEADER_BYTES + 2 * len(TOKENS) - 1))
def test_truncated_at_any_byte(size: int, whole: bytes, damaged: Path) -> None:
    damaged.write_bytes(whole[:size])
    with pytest.raises(ValueError, match=r"damaged\.bin .*(truncated|fewer than the header)"):
        open_shard(damaged)


@settings(max_examples=20, deadline=None)
@given(extra=st.binary(min_size=1, max_size=64))
def test_bytes_after_the_end(extra: bytes, whole: bytes, damaged: Path) -> None:
    damaged.write_bytes(whole + extra)
    with pytest.raises(ValueError, match=r"damaged\.bin is too long"):
        open_shard(damaged)


@settings(max_examples=60, deadline=None)
@given(field=st.integers(0, 2), value=st.integers(-(2**31), 2**31 - 1))
def test_any_other_header_field(field: int, value: int, whole: bytes, damaged: Path) -> None:
    header = np.frombuffer(whole[:HEADER_BYTES], dtype="<i4").copy()
    if header[field] == value:
        return
    header[field] = value
    damaged.write_bytes(header.tobytes() + whole[HEADER_BYTES:])
    reason = ("magic number", "format version", "truncated|too long|header that says")[field]
    with pytest.raises(ValueError, match=rf"damaged\.bin .*({reason})"):
        open_shard(damaged)


def test_no_tokens(whole: bytes, damaged: Path) -> None:
    header = np.frombuffer(whole[:HEADER_BYTES], dtype="<i4").copy()
    header[2] = 0
    damaged.write_bytes(header.tobytes())
    with pytest.raises(ValueError, match=r"damaged\.bin has a header that says 0 tokens"):
        open_shard(damaged)


def test_token_outside_the_vocabulary_is_named_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaleinv.data.shards._CHUNK", 16)  # so that it lies in a later chunk
    path = tmp_path / "a.bin"
    write_shard(path, TOKENS)
    assert len(open_shard(path, vocab_size=50)) == 50
    with pytest.raises(ValueError, match=r"a\.bin has token 37 at 37, outside the vocabulary of 37"):
        open_shard(path, vocab_size=37)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.bin")
    with pytest.raises(ValueError, match=r"missing\.bin cannot be read"):
        open_shard(tmp_path / "missing.bin")
    for path in (tmp_path, tmp_path / "pipe.bin"):
        with pytest.raises(ValueError, match=f"{path} is not a regular file"):
            open_shard(path)


@pytest.mark.parametrize(
    "tokens",
    [np.empty(0, np.uint16), np.zeros((2, 2), np.uint16), np.zeros(3), np.array([-1]), np.array([2**16])],
    ids=["empty", "2d", "float", "negative", "above"],
)
def test_writer_refuses(tmp_path: Path, tokens: np.ndarray) -> None:
    with pytest.raises(ValueError, match="tokens must"):
        write_shard(tmp_path / "a.bin", tokens)
    assert not list(tmp_path.iterdir())


def test_failed_write_keeps_the_old_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.bin"
    write_shard(path, TOKENS)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_shard(path, TOKENS[:3])
    assert open_shard(path).tolist() == TOKENS.tolist()
    assert [file.name for file in tmp_path.iterdir()] == ["a.bin"]


def test_scan_is_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = tmp_path / "a.bin", tmp_path / "cache"
    write_shard(path, TOKENS)
    first = scan_shard(path, cache)
    assert first == (50, 49, hashlib.sha256(TOKENS.tobytes()).hexdigest())

    def unread(_: np.ndarray) -> None:
        raise AssertionError("the tokens were read again")

    with monkeypatch.context() as patch:
        patch.setattr("scaleinv.data.shards._chunks", unread)
        assert scan_shard(path, cache) == first
    for memory in cache.iterdir():
        memory.write_text("{")  # damaged: read again
    assert scan_shard(path, cache) == first
    write_shard(path, TOKENS[:7])
    assert scan_shard(path, cache)[:2] == (7, 6)
