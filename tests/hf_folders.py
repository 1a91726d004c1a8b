"""Tiny pretrained models as folders, with a tokenizer of their own: what `scaleinv adapt` takes."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_builders import MODELS

VOCABULARY = 258
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. "


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and two that begin and end a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {character: number + 2 for number, character in enumerate(alphabet)} | {"<s>": 0, "</s>": 1}
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def small_model(model_type: str = "llama", **changes: object) -> PreTrainedModel:
    """Two layers, trained for 32 tokens, they say."""
    torch.manual_seed(0)
    size = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.1}  # positions matter
    config = CONFIG_MAPPING[model_type](
        **{**size, **heads, **ids, **copy.deepcopy(MODELS.get(model_type, {})), **changes}
    )
    return AutoModelForCausalLM.from_config(config).eval()


def model_folder(folder: Path, model_type: str = "llama", **changes: object) -> Path:
    """Save a small model with its tokenizer."""
    small_model(model_type, **changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def text_folder(folder: Path, documents: int = 40) -> Path:
    """Documents that are not all the same."""
    folder.mkdir()
    for number in range(documents):
        (folder / f"{number:03d}.txt").write_text(f"Chapter {number}. " + TEXT * (1 + number % 5))
    return folder
