"""Small Hugging Face models that several test files need."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SLIDING = {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
MODELS: dict[str, dict] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, **SLIDING},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": ROPE, **SLIDING},
    "phi": {"partial_rotary_factor": 0.5},
    "smollm3": {"no_rope_layers": [1, 0]},
}


def make_hf(model_type: str, **changes: object) -> PreTrainedModel:
    """Two layers of four heads that share two keys, in float64 (experts know no more than float32)."""
    torch.manual_seed(0)
    shape = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
    config = CONFIG_MAPPING[model_type](**{**shape, **heads, **ids, **MODELS.get(model_type, {}), **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    return model if "num_local_experts" in MODELS.get(model_type, {}) else model.double()
