"""`convert`, `check` and their errors; LogN, calibration, folders."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen2VLConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import scaleinv.hf
from scaleinv.hf import mask as masks
from scaleinv.hf.config import ATTENTION
from scaleinv.hf.settings import Settings

Stock = Callable[[str], PreTrainedModel]


def logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def test_convert_returns_the_model_and_twice_is_an_error(stock: Stock) -> None:
    model = stock("llama")
    assert scaleinv.hf.conversion(model) is None
    assert scaleinv.hf.convert(model, tau=5.0) is model
    assert scaleinv.hf.conversion(model) == Settings(tau=5.0)
    with pytest.raises(ValueError, match=r"already converted .*tau=5\.0"):
        scaleinv.hf.convert(model)
    scaleinv.hf.revert(model)
    with pytest.raises(ValueError, match="not converted"):
        scaleinv.hf.revert(model)


def test_revert_to_what_is_not_there_leaves_the_model_converted(stock: Stock, tokens: Tensor) -> None:
    model = stock("llama")
    expected = logits(model, tokens)
    scaleinv.hf.convert(model)
    settings, converted = scaleinv.hf.conversion(model), logits(model, tokens)
    with pytest.raises(ValueError, match=r"attn_implementation='flash_attention_2' is not available for this model"):
        scaleinv.hf.revert(model, attn_implementation="flash_attention_2")
    assert scaleinv.hf.conversion(model) == settings
    assert torch.equal(logits(model, tokens), converted)
    scaleinv.hf.revert(model, attn_implementation="eager")
    torch.testing.assert_close(logits(model, tokens), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tau": 0.0}, "tau must be positive"),
        ({"p": 1.5}, "p must lie between 0 and 1"),
        ({"logits": "alibi"}, "logits must be one of"),
        ({"logits": "logn", "train_length": 1}, "train_length must be at least 2"),
        ({"calibration": torch.ones(2, 3)}, r"\[layers, heads\] = \[2, 4\], got \[2, 3\]"),
        ({"calibration": {2: torch.ones(4)}}, r"layers \[2\], but the model has layers 0 … 1"),
        ({"calibration": {0: torch.ones(3)}}, r"calibration\[0\] must have shape \[4\]"),
        ({"calibration": torch.full((2, 4), math.nan)}, "calibration must be finite"),
    ],
)
def test_bad_arguments_leave_the_model_alone(stock: Stock, arguments: dict, message: str) -> None:
    model = stock("llama")
    with pytest.raises(ValueError, match=message):
        scaleinv.hf.convert(model, **arguments)
    assert scaleinv.hf.conversion(model) is None
    assert model.config._attn_implementation == "sdpa"


def test_what_cannot_be_converted() -> None:
    tiny = {"vocab_size": 20, "num_layers": 1, "num_heads": 2, "d_model": 16, "d_ff": 16, "d_kv": 8}
    with pytest.raises(ValueError, match="encoder-decoder"):
        scaleinv.hf.convert(T5ForConditionalGeneration(T5Config(**tiny)))
    small = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    with pytest.raises(ValueError, match="BertSelfAttention in BertModel is bidirectional"):
        scaleinv.hf.convert(BertModel(BertConfig(num_attention_heads=2, **small)), p=None)
    with pytest.raises(ValueError, match="does not take its attention from transformers' AttentionInterface"):
        scaleinv.hf.convert(MambaForCausalLM(MambaConfig(state_size=4, vocab_size=20, hidden_size=16)), p=None)
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    text = {**small, "num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": rope}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2}
    special = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, **special)
    with pytest.raises(ValueError, match="M-RoPE"):
        scaleinv.hf.convert(AutoModelForImageTextToText.from_config(config))
    with pytest.raises(TypeError, match="transformers model"):
        scaleinv.hf.convert(torch.nn.Linear(2, 2))


def test_a_model_without_rotary_embedding(tokens: Tensor) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=16, n_layer=1, n_head=2, n_positions=128)).eval()
    expected = logits(model, tokens)
    with pytest.raises(ValueError, match="p=None"):
        scaleinv.hf.convert(model)
    scaleinv.hf.convert(model, tau=1e12, p=None)
    torch.testing.assert_close(logits(model, tokens), expected, atol=1e-5, rtol=0)


def test_logn_is_plain_attention_at_the_training_length(stock: Stock, tokens: Tensor) -> None:
    """Of one layer, the last query sees train_length keys: only there are the logits the stock ones."""
    model = stock("llama")
    model.model.layers = model.model.layers[:1]
    expected = logits(model, tokens)
    scaleinv.hf.convert(model, logits="logn", p=None, train_length=40)
    got = logits(model, tokens)
    torch.testing.assert_close(got[:, -1], expected[:, -1], atol=1e-5, rtol=0)
    assert (got[:, 20] - expected[:, 20]).abs().max() > 0.01
    assert scaleinv.hf.check(model, length=40, progress=None).ok
    scaleinv.hf.revert(model)
    scaleinv.hf.convert(model, logits="logn")
    conversion = scaleinv.hf.conversion(model)
    assert conversion is not None
    assert conversion.train_length == 256


def test_plain_logits_change_the_rotary_alone(stock: Stock, tokens: Tensor) -> None:
    model = stock("llama")
    expected = logits(model, tokens)
    scaleinv.hf.convert(model, logits="plain", p=None)
    torch.testing.assert_close(logits(model, tokens), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["scale-invariant", "logn"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_calibration_multiplies_the_scores(
    stock: Stock, model_type: str, tokens: Tensor, name: str, tmp_path: Path
) -> None:
    """The same as queries that are larger by the factor, wherever nothing but the score sees them."""
    factors = torch.tensor([[0.5, 2.0, 1.0, 1.5], [1.0, 3.0, 0.25, 1.0]])
    model, other = stock(model_type), stock(model_type)
    for m in (model, other):
        m.config.attn_logit_softcapping = None
        for layer in m.model.layers:
            layer.self_attn.attn_logit_softcapping = None
    scaleinv.hf.convert(model, logits=name, calibration=factors)
    scaleinv.hf.convert(other, logits=name)
    for layer, row in zip(other.model.layers, factors, strict=True):
        weight = layer.self_attn.q_proj.weight
        weight.data = (weight.unflatten(0, (4, -1)) * row[:, None, None]).flatten(0, 1).detach()
    expected = logits(other, tokens)
    torch.testing.assert_close(logits(model, tokens), expected, atol=1e-4, rtol=0)
    assert scaleinv.hf.check(model, length=40, progress=None).ok
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again, tokens), logits(model, tokens))


def test_calibration_of_some_layers(stock: Stock, tokens: Tensor) -> None:
    some = scaleinv.hf.convert(stock("llama"), calibration={1: [2.0, 1.0, 1.0, 0.5]})
    conversion = scaleinv.hf.conversion(some)
    assert conversion is not None
    assert conversion.calibration == ((1.0, 1.0, 1.0, 1.0), (2.0, 1.0, 1.0, 0.5))


def test_check_reports(stock: Stock) -> None:
    said: list[str] = []
    model = scaleinv.hf.convert(stock("mistral")).train()
    result = scaleinv.hf.check(model, length=40, progress=said.append)
    assert result.ok
    assert model.training
    assert said == [str(result)]
    assert "cached = full" in said[0]
    assert "packed = split" in said[0]
    broken = scaleinv.hf.CheckResult({"cached = full": 0.5}, 1e-4)
    assert not broken.ok
    assert "DIFFERS" in str(broken)
    with pytest.raises(ValueError, match="length"):
        scaleinv.hf.check(model, length=3)


def test_check_finds_a_mask_that_forgets_the_padding(stock: Stock) -> None:
    model = scaleinv.hf.convert(stock("gemma3_text"))

    def forgetful(attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        return masks.attention_mask(**kwargs)

    AttentionMaskInterface.register(ATTENTION, forgetful)
    try:
        result = scaleinv.hf.check(model, progress=None)
    finally:
        AttentionMaskInterface.register(ATTENTION, masks.attention_mask)
    wrong = {name for name, difference in result.differences.items() if difference > result.tolerance}
    assert wrong == {"padded = unpadded"}


def test_convert_folder(stock: Stock, tokens: Tensor, tmp_path: Path) -> None:
    stock("llama").save_pretrained(tmp_path / "stock")
    scaleinv.hf.convert_folder(tmp_path / "stock", tmp_path / "out", 5.0, 0.25)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert scaleinv.hf.conversion(model) == Settings(tau=5.0, p=0.25)
    assert torch.equal(logits(model, tokens), logits(scaleinv.hf.convert(stock("llama"), tau=5.0, p=0.25), tokens))
    with pytest.raises(ValueError, match="empty folder"):
        scaleinv.hf.convert_folder(tmp_path / "stock", tmp_path / "out")
    (tmp_path / "stock" / "tokenizer_config.json").write_text('{"tokenizer_class": "NoSuchTokenizer"}')
    with pytest.raises(ValueError, match=r"tokenizer of .* cannot be loaded"):
        scaleinv.hf.convert_folder(tmp_path / "stock", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_lm_eval_is_missed_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    with pytest.raises(SystemExit, match="pip install"):
        scaleinv.hf.lm_eval_main()


def test_scaleinv_alone_does_not_import_transformers() -> None:
    code = (
        "import sys, scaleinv; assert 'transformers' not in sys.modules; sys.modules['transformers'] = None\n"
        "try:\n    import scaleinv.hf\nexcept ImportError as error:\n    print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert 'pip install "scaleinv[hf]"' in ran.stdout
