"""Every supported architecture, converted: the same logits however the tokens come, and the stock ones at tau → ∞."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel, StaticCache

import scaleinv.hf
from scaleinv import schedule

Stock = Callable[[str], PreTrainedModel]


def logits(model: PreTrainedModel, tokens: Tensor, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(tokens, **{"use_cache": False, **inputs}).logits


@pytest.fixture
def converted(stock: Stock, model_type: str) -> PreTrainedModel:
    return scaleinv.hf.convert(stock(model_type))


def test_equals_stock_at_large_tau_and_after_revert(stock: Stock, model_type: str, tokens: Tensor) -> None:
    model = stock(model_type)
    expected, config = logits(model, tokens), copy.deepcopy(model.config)
    scaleinv.hf.convert(model, tau=1e12, p=None)
    torch.testing.assert_close(logits(model, tokens), expected, atol=1e-4, rtol=0)
    scaleinv.hf.revert(model)
    scaleinv.hf.convert(model)
    assert (logits(model, tokens) - expected).abs().max() > 0.1
    scaleinv.hf.revert(model)
    assert torch.equal(logits(model, tokens), expected)
    assert type(model.config) is type(config)
    assert model.config.to_dict() == config.to_dict()
    assert model.config._attn_implementation == config._attn_implementation


def naive_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """The formula, for one row without padding or cache: an implementation that shares nothing but `schedule`."""
    count = query.shape[2]
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    t = torch.arange(count)[:, None] - torch.arange(count)
    S = torch.einsum("bhid,bhjd->bhij", query, key) * scaling
    if kwargs.get("softcap"):
        S = kwargs["softcap"] * torch.tanh(S / kwargs["softcap"])
    a, m = schedule.coefficients(t.clamp_min(0), tau=3.0, dtype=torch.float32)
    hidden = (t < 0) | (t >= (kwargs.get("sliding_window") or count))
    weights = torch.exp(a * S + m).masked_fill(hidden, 0.0)
    total = weights.sum(-1, keepdim=True)
    if kwargs.get("s_aux") is not None:
        total = total + kwargs["s_aux"].exp()[:, None, None]
    return (weights / total @ value).transpose(1, 2), None


def test_computes_the_formula(stock: Stock, model_type: str, tokens: Tensor) -> None:
    model = stock(model_type)
    AttentionInterface.register("naive", naive_attention)
    model.set_attn_implementation("naive")
    expected = logits(model, tokens[:1])
    scaleinv.hf.convert(model, tau=3.0, p=None)
    torch.testing.assert_close(logits(model, tokens[:1]), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("cache_type", ["dynamic", "static"])
def test_cached_equals_full_with_left_padding(converted: PreTrainedModel, tokens: Tensor, cache_type: str) -> None:
    mask = torch.ones_like(tokens)
    mask[1, :11] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    full = logits(converted, tokens, attention_mask=mask, position_ids=positions)
    cache: Cache = (
        DynamicCache(config=converted.config)
        if cache_type == "dynamic"
        else StaticCache(config=converted.config, max_cache_len=48)
    )
    cuts = [0, 15, 30, 37, 38, 39, 40]  # a prefill, two chunks, single steps
    steps = [
        logits(
            converted,
            tokens[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            past_key_values=cache,
            use_cache=True,
        )
        for start, stop in itertools.pairwise(cuts)
    ]
    real = mask.bool()
    torch.testing.assert_close(torch.cat(steps, dim=1)[real], full[real], atol=1e-4, rtol=0)
    alone = logits(converted, tokens[1:, 11:])
    torch.testing.assert_close(full[1, 11:], alone[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gpt_neox", "olmo2", "smollm3"])
def test_right_padding_and_then_decoding(converted: PreTrainedModel, tokens: Tensor) -> None:
    """Holes: positions count the real tokens. (A sliding window counts places, here as in the stock models.)"""
    expected = logits(converted, tokens[1:, :26])
    cache = DynamicCache(config=converted.config)
    mask = torch.ones(2, 33, dtype=torch.long)
    mask[1, 23:30] = 0
    got = logits(converted, tokens[:, :30], attention_mask=mask[:, :30], past_key_values=cache, use_cache=True)
    torch.testing.assert_close(got[1, :23], expected[0, :23], atol=1e-4, rtol=0)
    for step in range(3):
        got = logits(
            converted,
            torch.stack([tokens[0, 30 + step], tokens[1, 23 + step]])[:, None],
            attention_mask=mask[:, : 31 + step],
            position_ids=torch.tensor([[30 + step], [23 + step]]),
            past_key_values=cache,
            use_cache=True,
        )
        torch.testing.assert_close(got[1, 0], expected[0, 23 + step], atol=1e-4, rtol=0)


def test_packed_equals_split(converted: PreTrainedModel, tokens: Tensor) -> None:
    lengths = [1, 17, 22]
    positions = torch.cat([torch.arange(length) for length in lengths])[None].expand(2, -1)
    packed = logits(converted, tokens, position_ids=positions)
    split = torch.cat([logits(converted, part) for part in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, split, atol=1e-4, rtol=0)


def test_gradients_with_activation_checkpointing(converted: PreTrainedModel, tokens: Tensor) -> None:
    converted.train()

    def gradients() -> dict[str, Tensor]:
        converted.zero_grad()
        converted(tokens, labels=tokens, use_cache=False).loss.backward()
        return {name: x.grad.clone() for name, x in converted.named_parameters() if x.grad is not None}

    expected = gradients()
    converted.gradient_checkpointing_enable()
    got = gradients()
    assert expected
    assert expected.keys() == got.keys()
    for name, gradient in got.items():
        assert gradient.isfinite().all(), name
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4)


def test_generates(converted: PreTrainedModel, tokens: Tensor) -> None:
    mask = torch.ones_like(tokens[:, :20])
    mask[1, :7] = 0
    prompt = torch.where(mask.bool(), tokens[:, :20], 0)
    settings = {"attention_mask": mask, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    greedy = converted.generate(prompt, **settings)
    assert greedy.shape == (2, 26)
    assert torch.equal(converted.generate(prompt, use_cache=False, **settings), greedy)
    assert torch.equal(converted.generate(prompt, cache_implementation="static", **settings), greedy)
    alone = converted.generate(prompt[1:, 7:], **{**settings, "attention_mask": mask[1:, 7:]})
    assert torch.equal(alone[0], greedy[1, 7:])
    beams = converted.generate(prompt, num_beams=3, **settings)
    assert torch.equal(converted.generate(prompt, num_beams=3, use_cache=False, **settings), beams)
    torch.manual_seed(0)
    sampled = converted.generate(prompt, **{**settings, "do_sample": True})
    assert sampled.shape == (2, 26)


def test_bfloat16(stock: Stock, model_type: str, tokens: Tensor, tmp_path: Path) -> None:
    """In bfloat16 a converted model is about as far from its float32 self as the stock model is from its own."""
    errors = []
    for name in ("stock", "converted"):
        model = stock(model_type) if name == "stock" else scaleinv.hf.convert(stock(model_type))
        exact = logits(model, tokens)
        model.save_pretrained(tmp_path / name)
        rounded = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16)
        assert {x.dtype for key, x in rounded.named_buffers() if "inv_freq" in key} == {torch.float32}
        errors.append((logits(rounded, tokens).float() - exact).abs().mean().item())
    assert errors[1] < 2 * errors[0] + 0.01
    assert rounded.generate(tokens[:, :9], max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (2, 12)
