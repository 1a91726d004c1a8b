"""A saved conversion comes back, and nobody runs it as plain attention by mistake."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import scaleinv.hf

Stock = Callable[[str], PreTrainedModel]


def logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(tokens, use_cache=False).logits


@pytest.mark.parametrize("p", [0.5, None])
def test_three_round_trips(stock: Stock, model_type: str, tokens: Tensor, tmp_path: Path, p: float | None) -> None:
    plain = logits(stock(model_type), tokens)
    model = scaleinv.hf.convert(stock(model_type), tau=4.0, p=p)
    settings, expected = scaleinv.hf.conversion(model), logits(model, tokens)
    rotary = copy.deepcopy(model.config.rope_parameters)
    texts = []
    for trip in range(3):
        folder = tmp_path / str(trip)
        model.save_pretrained(folder)
        texts.append((folder / "config.json").read_text())
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert scaleinv.hf.conversion(model) == settings
        assert torch.equal(logits(model, tokens), expected)
    assert texts[0] == texts[1] == texts[2]
    assert model.config.rope_parameters == rotary
    assert model.config.architectures == [type(model).__name__]
    assert torch.equal(logits(scaleinv.hf.revert(model), tokens), plain)


def test_what_config_json_says(stock: Stock, tmp_path: Path) -> None:
    model = scaleinv.hf.convert(stock("llama"), tau=4.0)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "scaleinv.hf"
    assert saved["architectures"] == ["ScaleInvariantLlamaForCausalLM"]
    assert saved["attn_implementation"].startswith("scaleinv (import scaleinv.hf")
    assert saved["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "scaleinv-default", "p": 0.5}
    assert (saved["scaleinv"]["stock_model_type"], saved["scaleinv"]["tau"]) == ("llama", 4.0)
    assert model.config.model_type == "llama"  # in memory everyone sees the model that they know
    assert type(AutoModel.from_pretrained(tmp_path)).__name__ == "LlamaModel"
    config = AutoConfig.from_pretrained(tmp_path)
    config.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert again["scaleinv"] == saved["scaleinv"]


LOAD = """
import sys
from transformers import AutoModelForCausalLM, LlamaForCausalLM
for folder in sys.argv[1:]:
    for loader in (AutoModelForCausalLM, LlamaForCausalLM):
        for options in ({}, {"attn_implementation": "sdpa"}):
            try:
                loader.from_pretrained(folder, **options)
            except ValueError as error:
                print("ValueError", error)
            else:
                print("loaded")
assert "scaleinv" not in sys.modules
"""


@pytest.mark.slow
def test_loading_without_scaleinv_is_a_clear_error(stock: Stock, tmp_path: Path) -> None:
    folders = [str(tmp_path / "p-rope"), str(tmp_path / "rope")]
    for folder, p in zip(folders, (0.5, None), strict=True):
        scaleinv.hf.convert(stock("llama"), p=p).save_pretrained(folder)
    ran = subprocess.run([sys.executable, "-c", LOAD, *folders], capture_output=True, text=True, check=True)
    assert "loaded" not in ran.stdout
    assert ran.stdout.count("model type `scaleinv.hf` but Transformers does not recognize") == 4
    assert ran.stdout.count("scaleinv (import scaleinv.hf and load the model with an Auto class)") == 4


@pytest.mark.parametrize("p", [0.5, None])
def test_stock_classes_and_other_attention_are_refused(stock: Stock, tmp_path: Path, p: float | None) -> None:
    model = scaleinv.hf.convert(stock("llama"), p=p)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Auto class"):
        LlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Auto class"):
        LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    with pytest.raises(ValueError, match=r"scaleinv\.hf\.revert"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    with pytest.raises(ValueError, match=r"scaleinv\.hf\.revert"):
        model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="paged"):
        model.set_attn_implementation("paged|eager")
    assert model.config._attn_implementation == "scaleinv"
    assert AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="scaleinv") is not None


@pytest.mark.parametrize("p", [0.5, None])
def test_stock_configs_made_of_a_converted_one_are_refused(stock: Stock, tmp_path: Path, p: float | None) -> None:
    model = scaleinv.hf.convert(stock("llama"), p=p)
    for values in (model.config.to_dict(), model.config.to_diff_dict()):
        values.pop("model_type")
        with pytest.raises(ValueError, match="Auto class"):
            AutoModelForCausalLM.from_config(LlamaConfig(**values))
    again = type(model.config).from_dict(model.config.to_dict())
    assert scaleinv.hf.conversion(AutoModelForCausalLM.from_config(again)) == scaleinv.hf.conversion(model)


def test_newer_settings_are_refused(stock: Stock, tmp_path: Path) -> None:
    scaleinv.hf.convert(stock("llama")).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    saved = json.loads(path.read_text())
    saved["scaleinv"]["sigma"] = 1
    path.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="sigma"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_copies_and_pickles(stock: Stock, tokens: Tensor) -> None:
    model = scaleinv.hf.convert(stock("gemma3_text"))
    expected = logits(model, tokens)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other, tokens), expected)
        assert other.config is not model.config
        assert scaleinv.hf.conversion(other) == scaleinv.hf.conversion(model)
    scaleinv.hf.revert(other)
    assert scaleinv.hf.conversion(model) is not None


def test_composite_models_convert_only_the_text_part(tokens: Tensor, tmp_path: Path) -> None:
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**size, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 70, "sliding_window": 12}
    vision = {**size, "image_size": 28, "patch_size": 14}
    special = {"image_token_index": 65, "boi_token_index": 66, "eoi_token_index": 67, "mm_tokens_per_image": 4}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(Gemma3Config(text_config=text, vision_config=vision, **special))
    plain = logits(model, tokens)
    scaleinv.hf.convert(model)
    assert model.config.text_config._attn_implementation == "scaleinv"
    assert model.config.vision_config._attn_implementation == "sdpa"
    expected = logits(model, tokens)
    assert not torch.allclose(expected, plain, atol=1e-3)
    for trip in range(2):
        model.save_pretrained(tmp_path / str(trip))
        model = AutoModelForImageTextToText.from_pretrained(tmp_path / str(trip))
        assert torch.equal(logits(model, tokens), expected)
    assert model.config.vision_config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="Auto class"):
        Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "0", attn_implementation="sdpa")
    assert torch.equal(logits(scaleinv.hf.revert(model), tokens), plain)
    # The text part converted by itself: its settings do not come back with the whole, so the whole is refused.
    scaleinv.hf.convert(model.model.language_model, p=None)
    model.save_pretrained(tmp_path / "part")
    with pytest.raises(ValueError, match="Auto class"):
        AutoModelForImageTextToText.from_pretrained(tmp_path / "part")
