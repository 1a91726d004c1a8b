"""Tiny random models of each architecture, built once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
TINY: dict[str, dict] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": 12},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, **LAYERS},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 24, **LAYERS},
    "gpt_neox": {"hidden_act": "gelu", "rotary_pct": 0.5},
    "olmo2": {},
    "phi3": {"sliding_window": 12},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, **LAYERS},
    "smollm3": {"no_rope_layers": [1, 0]},
}


def _build(model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4 if model_type != "phi3" else 2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,  # scores that matter
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **TINY[model_type],
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower on more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def stock() -> Callable[[str], PreTrainedModel]:
    """``stock("llama")`` is a fresh copy of the tiny stock model."""
    built: dict[str, PreTrainedModel] = {}

    def make(model_type: str) -> PreTrainedModel:
        if model_type not in built:
            built[model_type] = _build(model_type)
        return copy.deepcopy(built[model_type])

    return make


@pytest.fixture(params=sorted(TINY))
def model_type(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(3, 61, (2, 40), generator=torch.Generator().manual_seed(1))
