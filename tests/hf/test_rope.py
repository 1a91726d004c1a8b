"""p-RoPE on trained models: their own frequencies, with a tail of zeros."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, HunYuanDenseV1Config, LlamaConfig, PhimoeConfig, PreTrainedModel

import scaleinv.hf
from scaleinv.hf.rope import BASE_TYPES

Stock = Callable[[str], PreTrainedModel]
SCALED: dict[str, dict] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}


def frequencies(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.named_buffers() if name.endswith("inv_freq")}


def llama(**rope: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 10_000.0, **rope},
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("rope_type", BASE_TYPES)
@pytest.mark.parametrize("p", [0.0, 0.25, 0.5, 1.0])
def test_keeps_the_scaling_and_zeroes_the_tail(rope_type: str, p: float, tmp_path: Path) -> None:
    model = llama(rope_type=rope_type, **SCALED[rope_type])
    before, scaling = frequencies(model), model.model.rotary_emb.attention_scaling
    scaleinv.hf.convert(model, p=p)
    kept = round(p * 8)
    for _ in range(2):
        for name, x in frequencies(model).items():
            assert torch.equal(x[:kept], before[name][:kept])
            assert not x[kept:].any()
        assert model.model.rotary_emb.attention_scaling == scaling
        model.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    after = frequencies(scaleinv.hf.revert(model))
    assert all(torch.equal(after[name], x) for name, x in before.items())


def test_dynamic_scaling_still_follows_the_length() -> None:
    tokens = torch.arange(100)[None] % 61
    stock, model = (llama(rope_type="dynamic", factor=4.0) for _ in range(2))
    scaleinv.hf.convert(model, p=0.5)
    with torch.no_grad():
        stock(tokens)
        model(tokens)
    grown, expected = model.model.rotary_emb.inv_freq, stock.model.rotary_emb.inv_freq
    assert not torch.equal(grown, model.model.rotary_emb.original_inv_freq)
    assert torch.equal(grown[:4], expected[:4])
    assert not grown[4:].any()


def test_all_architectures(stock: Stock, model_type: str) -> None:
    model = stock(model_type)
    before = frequencies(model)
    after = frequencies(scaleinv.hf.convert(model, p=0.5))
    assert before.keys() == after.keys()
    for name, x in after.items():
        half = x.numel() // 2
        assert torch.equal(x[:half], before[name][:half])
        assert not x[half:].any()


def test_unsupported_rotary_raises_and_leaves_the_model_alone() -> None:
    factors = [1.0] * 8
    model = llama(
        rope_type="longrope", short_factor=factors, long_factor=factors, original_max_position_embeddings=64, factor=1.0
    )
    with pytest.raises(ValueError, match=r"'longrope'.*p=None"):
        scaleinv.hf.convert(model)
    assert scaleinv.hf.conversion(model) is None
    assert model.config._attn_implementation == "sdpa"
    assert scaleinv.hf.conversion(scaleinv.hf.convert(model, p=None)) is not None


def test_rotary_modules_of_their_own_kind_raise_and_leave_the_model_alone() -> None:
    size = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    alpha = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10_000.0}
    configs = (
        HunYuanDenseV1Config(**size, **heads, head_dim=16, rope_parameters=alpha),  # "dynamic" by name alone
        PhimoeConfig(**size, **heads, num_local_experts=2),  # its forward asks the rotary type
    )
    for config in configs:
        model = AutoModelForCausalLM.from_config(config).eval()
        before, tokens = frequencies(model), torch.arange(9)[None]
        with torch.no_grad():
            expected = model(tokens).logits
            with pytest.raises(ValueError, match="p=None"):
                scaleinv.hf.convert(model)
            assert scaleinv.hf.conversion(model) is None
            assert all(torch.equal(x, before[name]) for name, x in frequencies(model).items())
            assert torch.equal(model(tokens).logits, expected)
            scaleinv.hf.convert(model, p=None, tau=1e12)
            torch.testing.assert_close(model(tokens).logits, expected, atol=1e-4, rtol=0)


def test_frequencies_of_a_kind_we_do_not_know_raise() -> None:
    model = llama(rope_type="default")
    model.model.rotary_emb.inv_freq.mul_(0.5)
    with pytest.raises(ValueError, match="does not compute its frequencies"):
        scaleinv.hf.convert(model)
