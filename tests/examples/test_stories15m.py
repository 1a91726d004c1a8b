"""`examples/stories15m.py` on small checkpoints: llama2.c's layout, its tokenizer, and files that are not it."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

PIECES = [" ", "a", "b", "c", "ab", "abc", " a", " ab", "bc", "ca", "é", "  "]


@pytest.fixture(scope="module")
def example(load_example) -> ModuleType:
    return load_example("stories15m")


def checkpoint(*, tied: bool = True, kv_heads: int = 2) -> bytes:
    """Random weights in llama2.c's format, and a tokenizer of a few pieces; later pieces have higher scores."""
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(bytes([byte]) for byte in range(256)), *(x.encode() for x in PIECES)]
    dim, hidden, layers, heads, length, vocabulary = 24, 40, 2, 4, 64, len(pieces)
    head = dim // heads
    layer = dim * (2 + heads * head * 2 + kv_heads * head * 2 + hidden * 3)
    count = vocabulary * dim * (1 if tied else 2) + layers * layer + dim + length * head
    weights = np.random.default_rng(0).normal(0, 0.3, count).astype("<f4")
    sizes = struct.pack("<7i", dim, hidden, layers, heads, kv_heads, vocabulary if tied else -vocabulary, length)
    scored = b"".join(struct.pack("<fi", float(i), len(piece)) + piece for i, piece in enumerate(pieces))
    return sizes + weights.tobytes() + struct.pack("<i", 8) + scored


@pytest.mark.parametrize(("tied", "kv_heads"), [(True, 4), (True, 2), (False, 1)])
def test_the_model_is_that_of_the_checkpoint(example: ModuleType, tied: bool, kv_heads: int) -> None:
    read = example.read(checkpoint(tied=tied, kv_heads=kv_heads))
    model = example.make_model(read).double()
    assert model.config.tie_word_embeddings == tied
    tokens = torch.randint(len(read.pieces), (30,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        got = model(torch.tensor([tokens])).logits[0]
    expected = example.reference_logits(read, tokens)
    assert expected.abs().max() > 1
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)  # transformers turns in float32
    with torch.no_grad():  # rows left in llama2.c's order would be another model
        layer = model.model.layers[0].self_attn
        layer.q_proj.weight.copy_(read.weights["q"][0])
        assert (model(torch.tensor([tokens])).logits[0] - expected).abs().max() > 0.1


def greedy(text: str, pieces: list[tuple[bytes, float]]) -> list[int]:
    """llama2.c's way: characters (or their bytes), then the neighbours whose piece has the highest score, again."""
    ids = {piece.decode("utf-8", "replace"): i for i, (piece, _) in enumerate(pieces) if i >= 259}
    found: list[tuple[str, int]] = []
    for character in f" {text}":
        if character in ids:
            found.append((character, ids[character]))
        else:
            found += [("\0", 3 + byte) for byte in character.encode()]
    while True:
        joined = [(found[i][0] + found[i + 1][0], i) for i in range(len(found) - 1)]
        known = [(pieces[ids[text]][1], -i) for text, i in joined if text in ids]
        if not known:
            return [number for _, number in found]
        place = -max(known)[1]
        text = found[place][0] + found[place + 1][0]
        found[place : place + 2] = [(text, ids[text])]


def test_the_tokenizer_is_that_of_the_checkpoint(example: ModuleType, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    pieces = example.read(checkpoint()).pieces
    example.make_tokenizer(pieces).save_pretrained(tmp_path)
    example.make_model(example.read(checkpoint())).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    random.seed(0)
    texts = ["abc", "a b", "x", "é", "日", "ab  c", *("".join(random.choices("abc é", k=12)) for _ in range(30))]
    for text in texts:
        ids = tokenizer(text).input_ids
        assert ids == [example.BOS, *greedy(text, pieces)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"short", "28 bytes of sizes, got a file of 5"),
        (b"\xff" * 100, "no llama2.c checkpoint: its sizes read"),
        (checkpoint()[:5000], "the file is cut short"),
        (checkpoint()[:-40], r"ends after \d+ of 271 pieces"),
        (checkpoint()[:-3], r"ends after 270 of 271 pieces"),
    ],
    ids=["tiny", "other", "weights", "tokenizer", "the last piece"],
)
def test_damaged_files(example: ModuleType, data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        example.read(data)


def test_stories_become_shards_and_are_not_sampled_twice(example: ModuleType, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(example, "ROWS", 4)
    model = example.make_model(example.read(checkpoint()))
    example.write_shards(model, tmp_path, 100)
    shards = sorted(tmp_path.iterdir())
    assert [path.name for path in shards][:2] == ["stories_train_000001.bin", "stories_val_000000.bin"]
    times = [path.stat().st_mtime_ns for path in shards]
    example.write_shards(model, tmp_path, 100)
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.iterdir())] == times
    whole = shards[0].read_bytes()
    shards[0].write_bytes(whole[:-1])
    example.write_shards(model, tmp_path, 100)
    assert shards[0].read_bytes() == whole  # a shard that was cut short is sampled anew
