"""Our GPT as a Hugging Face model of its own type, so that no engine can mistake it for plain attention.

`export` turns a training run into a folder that AutoModelForCausalLM and AutoTokenizer load after
``import scaleinv.hf``.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from scaleinv.data import BPETokenizer, ByteTokenizer, GPT2Tokenizer, Tokenizer
from scaleinv.data.tokenizers import END_OF_TEXT, byte_characters
from scaleinv.hf.cache import CertifiedCache
from scaleinv.model import GPT, GPTConfig, KVCache
from scaleinv.train.store import load_model, run_tokenizer

MODEL_TYPE = "scaleinv_gpt"
_CHARACTERS = byte_characters()


class ScaleInvGPTConfig(PreTrainedConfig):
    """`scaleinv.GPTConfig` under its own name, and the names that transformers asks for."""

    model_type = MODEL_TYPE
    attribute_map = {"hidden_size": "width", "num_hidden_layers": "layers", "num_attention_heads": "heads"}  # noqa: RUF012

    def __init__(self, gpt: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.gpt = dataclasses.asdict(GPTConfig(**(gpt or {})))
        self.width, self.layers, self.heads = (self.gpt[name] for name in ("width", "layers", "heads"))
        self.vocab_size = kwargs.pop("vocab_size", self.gpt["vocab_size"])  # another one after resizing
        kwargs.setdefault("max_position_embeddings", 64 * self.gpt["train_length"])
        self.max_position_embeddings = kwargs.pop("max_position_embeddings")
        super().__init__(**{**kwargs, "tie_word_embeddings": False})


class ScaleInvGPTForCausalLM(PreTrainedModel, GenerationMixin):
    """`scaleinv.GPT` with transformers' forward, caches and generation."""

    config_class = ScaleInvGPTConfig
    base_model_prefix = "gpt"
    _supports_sdpa = True  # attention is our own: whatever implementation is asked for is ignored
    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self, config: ScaleInvGPTConfig) -> None:
        super().__init__(config)
        self.gpt = GPT(GPTConfig(**{**config.gpt, "vocab_size": config.vocab_size}))
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        """`GPT` has initialised itself."""

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """No N × N mask for static caches: the padding mask is enough."""
        return attention_mask

    def get_input_embeddings(self) -> Any:
        return self.gpt.embedding

    def set_input_embeddings(self, value: Any) -> None:
        self.gpt.embedding = value

    def get_output_embeddings(self) -> Any:
        return self.gpt.output

    def set_output_embeddings(self, value: Any) -> None:
        self.gpt.output = value

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As every causal model of transformers; padding goes by ``attention_mask`` ``[B, past + N]``.

        Without a mask and a cache, ``position_ids`` that start again separate packed documents.
        """
        for name in ("inputs_embeds", "output_hidden_states", "output_attentions"):
            value = kwargs.get(name)
            if value is not None and value is not False:
                raise ValueError(f"{name} is not supported by {type(self).__name__}")
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(f"attention_mask must have shape [batch, length], got {list(attention_mask.shape)}")
        cached = past_key_values is not None or bool(use_cache)
        if cached and (self.gpt.method.infini or self.gpt.method.stretch):
            raise ValueError(f"{self.gpt.config.method} keeps no transformers cache: call with use_cache=False")
        cache = _Adapter(past_key_values or DynamicCache()) if cached else None
        key_mask = _key_mask(attention_mask, cache, input_ids)
        document_ids = None
        if position_ids is not None and attention_mask is None:
            document_ids = _document_ids(position_ids.expand(input_ids.shape), cached)
        last = (logits_to_keep or None) if isinstance(logits_to_keep, int) else None
        hidden = self.gpt.hidden(input_ids, cache=cache, document_ids=document_ids, key_mask=key_mask, last=last)
        logits = self.gpt.output(hidden if isinstance(logits_to_keep, int) else hidden[:, logits_to_keep])
        loss: Any = None
        if labels is not None:
            loss = self.loss_function(logits, labels, logits.shape[-1], **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache.cache if cache else None)


class _Adapter(KVCache):
    """A cache of transformers, as our model sees it."""

    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self.cache = cache
        self.length = int(cache.get_seq_length())

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> Tensor:
        if not isinstance(self.cache, CertifiedCache) or key.shape[2] > 1:
            return super().attend(layer, query, key, value, *arguments)
        logits, key_mask, _ = arguments
        self.cache.update(key, value, layer)
        return self.cache.layers[layer].attend(query, logits, query.shape[-1] ** -0.5, key_mask)

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.update(key, value, layer)
        stop = self.length + key.shape[2]  # a static cache has empty slots behind the text
        return keys[:, :, :stop], values[:, :, :stop]


def _key_mask(attention_mask: Tensor | None, cache: _Adapter | None, tokens: Tensor) -> Tensor | None:
    if attention_mask is None:
        return None
    mask = attention_mask.to(torch.bool)
    length = tokens.shape[1] + (cache.length if cache else 0)
    if mask.shape[1] < length:
        raise ValueError(f"attention_mask must cover all {length} tokens, past ones too, got {mask.shape[1]}")
    mask = mask[:, :length]
    if torch.compiler.is_compiling():  # a compiled graph cannot inspect it
        return mask
    if bool(mask.all()):
        return None
    if bool((mask[:, 1:] & ~mask[:, :-1] & (mask.cumsum(1)[:, :-1] > 0)).any()):
        raise ValueError("attention_mask has padding inside a text, which is not supported: pad on the left")
    return mask


def _document_ids(position_ids: Tensor, cached: bool) -> Tensor | None:
    """``[B, N]`` of packed documents; None for a single one."""
    starts = position_ids.diff(dim=1) != 1
    if not torch.compiler.is_compiling():
        if not bool(starts.any()):
            return None
        if cached:
            raise ValueError("position_ids must be consecutive with a cache: call with use_cache=False")
    return None if cached else F.pad(starts.cumsum(1), (1, 0))


def export(run: str | Path, out: str | Path) -> Path:
    """Write a training run as a folder for AutoModelForCausalLM and AutoTokenizer; returns it."""
    out = Path(out)
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"out must be a new or an empty folder, got {out}")
    gpt, config = load_model(run)
    shape = dataclasses.asdict(config.model)
    model = ScaleInvGPTForCausalLM(ScaleInvGPTConfig(shape))
    model.gpt.load_state_dict(gpt.state_dict())
    tokenizer = fast_tokenizer(run_tokenizer(run))
    model.config.bos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.config.use_cache = not (gpt.method.infini or gpt.method.stretch)
    model.generation_config.bos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.eos_token_id
    model.generation_config.use_cache = model.config.use_cache
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def fast_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The same tokenizer as transformers', with <|endoftext|> before each text, as in training."""
    import tokenizers as library

    if isinstance(tokenizer, ByteTokenizer):
        backend = library.Tokenizer(
            library.models.BPE({character: byte for byte, character in enumerate(_CHARACTERS)}, [])
        )
        backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = library.decoders.ByteLevel()
        backend.add_special_tokens([END_OF_TEXT])
    elif isinstance(tokenizer, BPETokenizer):
        backend = library.Tokenizer.from_str(tokenizer.to_json())
    elif isinstance(tokenizer, GPT2Tokenizer):
        ranks = tokenizer.ranks
        vocabulary = {_written(token): rank for token, rank in ranks.items()}
        merges = [(_written(a), _written(b)) for a, b in _merges(ranks)]
        backend = library.Tokenizer(library.models.BPE(vocabulary, merges))
        backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = library.decoders.ByteLevel()
        backend.add_special_tokens([END_OF_TEXT])
    else:
        raise ValueError(f"tokenizer {tokenizer.name!r} cannot be exported")
    backend.post_processor = library.processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, tokenizer.end_of_text)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        padding_side="left",
    )


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The merges of a byte-level BPE, in order: for each token, the pair left before its last merge."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            found = [ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
            place = found.index(min(found))
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def _written(token: bytes) -> str:
    """A token as byte-level tokenizers write it."""
    return "".join(_CHARACTERS[byte] for byte in token)


def register() -> None:
    """Let transformers' Auto classes know the model type."""
    AutoConfig.register(MODEL_TYPE, ScaleInvGPTConfig, exist_ok=True)
    AutoModelForCausalLM.register(ScaleInvGPTConfig, ScaleInvGPTForCausalLM, exist_ok=True)
