"""`scaleinv adapt`: variants, data, measures, and the whole command on tiny models."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import scaleinv.hf
from hf_folders import TEXT, VOCABULARY, byte_tokenizer, model_folder, small_model, text_folder
from scaleinv.adaptation import VARIANTS, AdaptConfig, parse_count, trained_as
from scaleinv.cli import main
from scaleinv.data import TokenData, write_shard
from scaleinv.eval.loss import read_evaluation
from scaleinv.eval.summary import read_summary
from scaleinv.files import read_lines
from scaleinv.hf.adapt import adapt, measure
from scaleinv.hf.adapt import data as texts
from scaleinv.hf.adapt.training import Steps, divergence
from scaleinv.hf.adapt.variants import as_variant
from scaleinv.train.distributed import World

HERE = World(0, 1, torch.device("cpu"))
SIZE = {"tokens": "1k", "batch_tokens": 256, "train_length": 32, "val_tokens": 512, "lengths": "1x,4x", "lr": 1e-2}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "adapt-cache"))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return model_folder(tmp_path / "model"), text_folder(tmp_path / "text")


def config(source: Path, text: Path, out: Path, **changes: Any) -> AdaptConfig:
    return AdaptConfig(**{"model": str(source), "data": str(text), "out": str(out), **SIZE, **changes})


# What is asked for


def test_variants_share_trained_models() -> None:
    found = AdaptConfig(model="m", variants="yarn, scale-invariant+yarn,stock").served()
    assert found == {"stock": ["stock", "yarn"], "scale-invariant": ["scale-invariant+yarn"]}
    assert all(trained_as(trained_as(name)) == trained_as(name) for name in VARIANTS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": "stok"}, "unknown variant 'stok': did you mean stock"),
        ({"variants": ""}, "variants must be text that is not empty"),
        ({"tokens": "50 cows"}, "tokens must read like 50M, 300k or 16384, got '50 cows'"),
        ({"tokens": "0"}, "tokens must read like"),
        ({"lengths": "4y"}, "lengths must read like 4x"),
        ({"lr": 0.0}, "lr must be positive and finite, got 0.0"),
        ({"lora": 0}, "lora must be a positive integer, got 0"),
        ({"fsdp": True, "lora": 8}, "fsdp goes without lora: .* got lora 8"),
        ({"device": "cuda:1"}, "device must be auto, cpu or cuda, got 'cuda:1': .* CUDA_VISIBLE_DEVICES"),
        ({"model": " "}, "model must be a folder or the id"),
    ],
)
def test_bad_settings(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptConfig(**{"model": "m", **changes})


def test_counts_as_people_write_them() -> None:
    assert [parse_count(x) for x in ("50M", "0.3m", "2k", "1_000", "1,000,000", "1B")] == [
        *(50_000_000, 300_000, 2000, 1000, 1_000_000, 1_000_000_000)
    ]


def test_steps_use_all_tokens_on_any_number_of_ranks() -> None:
    asked = AdaptConfig(model="m", tokens="10000", batch_tokens=2048, micro_tokens=600)
    for ranks in (1, 2, 4, 8):
        steps = Steps.of(asked, 128, ranks)
        assert (steps.count, steps.windows, steps.tokens) == (5, 16, 2048)
        assert steps.rows == min(4, 16 // ranks)
    with pytest.raises(ValueError, match="16 windows of 128 tokens per step, which 3 ranks cannot share"):
        Steps.of(asked, 128, 3)
    assert Steps.of(dataclasses.replace(asked, batch_tokens=5), 128, 1).tokens == 128


# Data


def test_text_becomes_the_models_own_tokens(tmp_path: Path) -> None:
    folder, tokenizer = text_folder(tmp_path / "text"), byte_tokenizer()
    splits = texts.load_splits(str(folder), None, tokenizer, VOCABULARY, cache=tmp_path / "cache")
    written = "".join(tokenizer.decode(split.read(0, split.total)) for split in splits)
    found = sorted(part for part in written.split("<s>") if part)
    assert found == sorted(path.read_text() for path in folder.iterdir())
    assert 1 <= sum(splits.val.read(0, splits.val.total) == 0) <= 10
    again = texts.load_splits(str(folder), None, tokenizer, VOCABULARY, cache=tmp_path / "cache")
    assert again.sha256 == splits.sha256
    expected = splits.train.read(0, splits.train.total)
    (file,) = (tmp_path / "cache").glob("*/train.npy")
    for damaged in (file.read_bytes()[:-100], file.read_bytes()[:-1] + b"x", b""):
        file.unlink()
        file.write_bytes(damaged)
        mended = texts.load_splits(str(folder), None, tokenizer, VOCABULARY, cache=tmp_path / "cache")
        assert np.array_equal(mended.train.read(0, mended.train.total), expected)
    with pytest.raises(ValueError, match="the model has 40 ids: they do not belong together"):
        texts.load_splits(str(folder), None, tokenizer, 40, cache=tmp_path / "cache")


def test_text_that_spells_a_special_token_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one</s>two")
    (tmp_path / "b.txt").write_text("three")
    tokenizer, data = byte_tokenizer(), f"{tmp_path}/a.txt,{tmp_path}/b.txt"
    splits = texts.load_splits(data, None, tokenizer, VOCABULARY, cache=tmp_path / "cache")
    assert not any((split.read(0, split.total) == 1).any() for split in splits)


def test_large_vocabularies_and_shards(tmp_path: Path) -> None:
    ids = np.arange(3000) % 60_000
    for split in ("train", "val"):
        write_shard(tmp_path / "shards" / f"x_{split}_000000.bin", ids + (split == "val"))
    splits = texts.load_splits(str(tmp_path / "shards"), None, byte_tokenizer(), 70_000, cache=tmp_path / "cache")
    assert (splits.train.total, int(splits.val.read(0, 1)[0])) == (3000, 1)
    with pytest.raises(ValueError, match="has token 1000 at 1000, outside the vocabulary of 1000"):
        texts.load_splits(str(tmp_path / "shards"), None, byte_tokenizer(), 1000, cache=tmp_path / "cache")
    np.save(tmp_path / "large.npy", np.array([200_000, 70_000, 3], dtype="<u4"))
    assert texts.ModelTokens(tmp_path / "large.npy", 0).batch(0, 1, 2)[0].tolist() == [[200_000, 70_000]]


def test_windows_come_in_the_seeds_order_once_per_epoch(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", np.arange(1001))
    data = TokenData([tmp_path / "a.bin"], 0)
    seen = {seed: [int(x["input_ids"][0]) for x in texts.Windows(data, 10, 100, seed)] for seed in (0, 1)}  # type: ignore[attr-defined]
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(0, 1000, 10))
    assert seen[0] != seen[1]


# Measures


@pytest.mark.parametrize("name", list(VARIANTS))
def test_losses_are_those_of_a_plain_forward(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks with a cache, in rows, and at once: the same numbers, with the stretch of the window's length."""
    asked = AdaptConfig(model="m")
    fit = torch.full((2, 4), -1.0), torch.full((2, 4), 3.0)
    model = as_variant(small_model(initializer_range=0.3), name, asked, 32, fit)
    tokens = torch.randint(2, VOCABULARY, (257,), generator=torch.Generator().manual_seed(0))
    write_shard(tmp_path / "a.bin", tokens.numpy())
    data = TokenData([tmp_path / "a.bin"], 0)
    for chunk in (16, 128, 1024):
        monkeypatch.setattr(measure, "LOGITS", chunk * VOCABULARY)
        found = measure.losses_by_length(model, data, {"1x": 32, "4x": 128}, 256, HERE, name, lambda line: None)
        for at in found.values():
            with torch.no_grad():
                logits = model(tokens[:-1].reshape(-1, at.length), use_cache=False).logits
            expected = F.cross_entropy(logits.flatten(0, 1), tokens[1:], reduction="none").reshape(-1, at.length)
            torch.testing.assert_close(torch.tensor(at.losses), expected.mean(1), atol=2e-6, rtol=1e-5)
            assert at.mean == pytest.approx(expected.mean().item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotaries_that_depend_on_the_length_read_windows_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    rotary = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, **factors}
    model = small_model(rope_parameters=rotary, initializer_range=0.3)
    tokens = torch.randint(2, VOCABULARY, (1, 65))
    losses = []
    for chunk in (16, 5000):
        monkeypatch.setattr(measure, "LOGITS", chunk * VOCABULARY)
        with torch.no_grad():
            losses.append(measure.Reader(model)(tokens[:, :-1], tokens[:, 1:]))
    assert torch.equal(*losses)


def test_distillation_is_the_divergence_from_the_teacher() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 2, 5, 7, dtype=torch.float64)
    p, q = teacher.softmax(-1), student.softmax(-1)
    expected = (p * (p.log() - q.log())).sum(-1).mean()
    torch.testing.assert_close(divergence(student, teacher).double(), expected, atol=1e-6, rtol=0)
    assert divergence(teacher, teacher).abs() < 1e-6


def frequencies(model: Any) -> torch.Tensor:
    """All frequencies that the model's rotary modules use."""
    return torch.cat([x for name, x in model.named_buffers() if "inv_freq" in name and "original" not in name])


# The whole


@pytest.mark.slow
def test_the_whole_command(folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model, data = folders
    out = tmp_path / "out"
    words = ["adapt", str(model), "--data", str(data), "--out", str(out), "--seeds", "2"]
    words += [x for name, value in SIZE.items() for x in (f"--{name.replace('_', '-')}", str(value))]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "before training\nValidation loss" in shown
    assert (out / "report.html").exists()
    after, before = read_summary(out / "summary.json"), read_summary(out / "before" / "summary.json")
    assert list(after.loss) == list(before.loss) == list(VARIANTS)
    saved = json.loads((out / "summary.json").read_text())
    assert saved["loss"]["scale-invariant+yarn"]["4x"]["mean"] > 0
    for name, by_length in after.loss.items():
        for label, at in by_length.items():
            assert at.value < before.loss[name][label].value - 0.1
            assert at.record["seeds"] == 2
            one = read_evaluation(out / "evaluations" / f"{name}-seed1.json").lengths[label]
            assert len(one.losses) * one.length == 512
    assert after.loss["yarn"]["1x"].value == after.loss["stock"]["1x"].value  # nothing is stretched there
    assert abs(after.loss["yarn"]["4x"].value - after.loss["stock"]["4x"].value) > 1e-4
    assert (out / "tables" / "differences.md").read_text().startswith("Loss minus that of Stock")
    assert not (out / "checkpoints").exists()

    text = AutoTokenizer.from_pretrained(out / "models" / "yarn-seed0")("The quick", return_tensors="pt")
    for name in VARIANTS:  # every variant is a folder that loads and generates beyond its trained length
        folder = out / "models" / f"{name}-seed0"
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        conversion = scaleinv.hf.conversion(loaded)
        assert (conversion is None) == (name == "stock")
        assert (conversion is not None and conversion.stretch == "yarn") == name.endswith("yarn")
        assert loaded.config.use_cache
        assert loaded.generate(**text, max_new_tokens=60, do_sample=False, eos_token_id=None).shape == (1, 69)

    times = {path: path.stat().st_mtime_ns for path in (out / "models").rglob("*") if path.is_file()}
    assert main(words) == 0  # all is done
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())
    assert main([*words, "--lr", "0.5"]) == 2
    assert "lr=0.01, but lr=0.5 is asked for: choose another out" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3", "gemma2", "gpt_oss", "phi"])
def test_architectures(model_type: str, tmp_path: Path) -> None:
    model, data = model_folder(tmp_path / "model", model_type), text_folder(tmp_path / "text")
    found = adapt(config(model, data, tmp_path / "out"))
    before = read_summary(tmp_path / "out" / "before" / "summary.json")
    for name in VARIANTS:
        for label in ("1x", "4x"):
            assert found.loss[name][label].value < before.loss[name][label].value - 0.1
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "models" / f"{name}-seed0") is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"distill": True},
        {"gradient_checkpointing": True},
        {"precision": "bfloat16", "distill": True},
    ],
    ids="-".join,
)
def test_ways_to_train(folders: tuple[Path, Path], tmp_path: Path, changes: dict) -> None:
    asked = config(*folders, tmp_path / "out", variants="stock,scale-invariant-p-rope", **changes)
    adapt(asked)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "models" / "scale-invariant-p-rope-seed0")
    conversion = scaleinv.hf.conversion(trained)
    assert conversion is not None
    assert conversion.tau == 10.0
    converted = as_variant(small_model(), "scale-invariant-p-rope", asked, 32)
    assert torch.equal(frequencies(trained), frequencies(converted))
    lines = read_lines(tmp_path / "out" / "curves" / "scale-invariant-p-rope-seed0.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    losses = [line["loss"] for line in lines]
    assert (losses[0] < 0.1) if changes.get("distill") else (losses[-1] < losses[0])  # close to its teacher at once


@pytest.mark.slow
def test_lora_trains_few_weights_and_leaves_a_plain_folder(folders: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    asked = config(*folders, tmp_path / "out", variants="scale-invariant", lora=2)
    adapt(asked)
    before = AutoModelForCausalLM.from_pretrained(folders[0]).state_dict()
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "models" / "scale-invariant-seed0")
    after = trained.state_dict()
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("proj" in name for name in changed)
    for name in changed:
        assert int(torch.linalg.matrix_rank((after[name] - before[name]).double(), rtol=1e-4)) <= 2
    assert scaleinv.hf.conversion(trained) is not None


@pytest.mark.slow
def test_bfloat16_arithmetic_trains_weights_of_float32(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Nearly those that float32 arithmetic gives; a folder knows which it holds."""
    found = {}
    for precision in ("auto", "bfloat16"):
        adapt(config(*folders, tmp_path / precision, variants="scale-invariant", precision=precision))
        folder = tmp_path / precision / "models" / "scale-invariant-seed0"
        found[precision] = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    start = AutoModelForCausalLM.from_pretrained(folders[0]).state_dict()
    exact, rounded = found.values()
    assert all(x.dtype == torch.float32 for x in rounded.values())
    moved, apart = (
        torch.cat([(x - other[name]).flatten() for name, x in exact.items()]).norm() for other in (start, rounded)
    )
    assert 0 < apart < moved / 4
    with pytest.raises(ValueError, match="with precision=float32, but precision=bfloat16 is asked for"):
        adapt(config(*folders, tmp_path / "auto", variants="scale-invariant", precision="bfloat16"))


@pytest.mark.slow
def test_bfloat16_models_stay_bfloat16(tmp_path: Path) -> None:
    small_model().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    adapt(config(tmp_path / "model", text_folder(tmp_path / "text"), tmp_path / "out", variants="p-rope"))
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "models" / "p-rope-seed0")
    assert trained.dtype == torch.bfloat16
    conversion = scaleinv.hf.conversion(trained)
    assert conversion is not None
    assert conversion.p == 0.5


# Mistakes


def absolute(folder: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64)).save_pretrained(
        folder
    )


@pytest.mark.parametrize(
    ("break_it", "changes", "message"),
    [
        (None, {"model": "no/such/model/here"}, "neither a folder nor the id of a model"),
        (None, {"data": "no-such-file.txt"}, "no-such-file.txt"),
        (None, {"lengths": "64x"}, "val_tokens must cover the longest of lengths, 2,048, got 512"),
        (None, {"lengths": "64x", "val_tokens": 9999}, "the held-out part of data .* has 932 tokens, fewer than one"),
        (None, {"train_length": 100_000}, "100,000"),
        (lambda folder: (folder / "tokenizer.json").unlink(), {}, "tokenizer"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"junk"), {}, "cannot be loaded"),
        (lambda folder: (folder / "config.json").write_text("{"), {}, "cannot be loaded"),
        (absolute, {"variants": "stock,scale-invariant"}, "learned positions for 64 tokens and no rotary"),
        (absolute, {"lengths": "1x,2x"}, "variant 'yarn' is not possible"),
        (
            lambda folder: scaleinv.hf.convert(small_model()).save_pretrained(folder),
            {},
            "is converted already",
        ),
        (None, {"distill": True, "train_length": 64, "lengths": "1x"}, "the stock model teaches at up to 32 tokens"),
        (None, {"fsdp": True, "device": "cpu"}, "fsdp needs several ranks on GPUs .* got 1 on cpu"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    folders: tuple[Path, Path],
    tmp_path: Path,
    break_it: Callable[[Path], Any] | None,
    changes: dict,
    message: str,
) -> None:
    if break_it is not None:
        break_it(folders[0])
    with pytest.raises(ValueError, match=message):
        adapt(config(*folders, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_another_launchers_fsdp_is_refused(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``accelerate launch --use_fsdp`` is known by what it sets."""
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(ValueError, match="start it with torchrun and --fsdp"):
        adapt(config(*folders, tmp_path / "out"))


def test_a_model_with_learned_positions(tmp_path: Path) -> None:
    absolute(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text(TEXT * 60)
    asked = config(
        tmp_path / "model", tmp_path / "a.txt", tmp_path / "out", variants="stock,scale-invariant", lengths="1x,2x"
    )
    assert list(adapt(asked).loss) == ["stock", "scale-invariant"]
