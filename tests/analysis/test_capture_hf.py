"""Hugging Face models: what transformers itself computes, and what a conversion does."""

import copy
import math

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from hf_builders import MODELS, make_hf
from scaleinv import hf
from scaleinv.analysis import Layer, calibrate, capture, model_statistics, score_statistics
from scaleinv.analysis.model import last_positions

TOKENS = torch.randint(3, 61, (300,), generator=torch.Generator().manual_seed(3))


def eager_weights(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Attention of transformers' own, ``[layers, heads, N, N]``."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return torch.cat(model(tokens[None], output_attentions=True, use_cache=False).attentions).double()


@pytest.mark.parametrize("model_type", MODELS)
def test_equals_eager_attention(model_type: str) -> None:
    model = make_hf(model_type)
    found = model_statistics(model, TOKENS, [200], windows=1).at(200)
    queries = last_positions(200, 64)
    A = eager_weights(model, TOKENS[:200])[:, :, queries]  # softmax in float32
    learned = 1 - A.sum(-1)
    torch.testing.assert_close(found.sink_share, (A[..., 0] + learned).mean(-1), atol=2e-6, rtol=1e-5)
    A[..., 0] = 0
    A = A / A.sum(-1, keepdim=True)
    distance = queries[:, None] - torch.arange(200)
    torch.testing.assert_close(found.entropy, -torch.special.xlogy(A, A).sum(-1).mean(-1), atol=2e-6, rtol=1e-5)
    for item, (start, stop) in enumerate(found.ranges):
        share = (A * ((distance >= start) & (distance < stop))).sum(-1).mean(-1)
        torch.testing.assert_close(found.range_share[..., item], share, atol=2e-6, rtol=1e-5)
    if "sliding_window" in MODELS[model_type]:
        assert found.range_share[0, :, 3].eq(0).all()  # behind the window of layer 0
        assert found.range_entropy[0, :, 3].isnan().all()


@pytest.mark.parametrize("model_type", MODELS)
def test_scores_without_the_rotary_are_those_of_a_model_that_does_not_turn(model_type: str) -> None:
    model, still = make_hf(model_type), make_hf(model_type)
    for module in still.modules():
        for name in ("inv_freq", "full_attention_inv_freq", "sliding_attention_inv_freq"):
            if hasattr(module, name):
                getattr(module, name).zero_()
    found: list[Layer] = []
    for each in (model, still):
        capture(each, TOKENS[None, :50], found.append)
    turned, plain = found[0], found[2]  # layer 0: later ones depend on what came before
    last = torch.tensor([30, 49])
    assert not torch.allclose(turned.scores(last), plain.scores(last))
    torch.testing.assert_close(turned.scores(last, rotary=False), plain.scores(last), atol=1e-5, rtol=1e-5)
    if model_type == "smollm3":
        torch.testing.assert_close(found[1].scores(last, rotary=False), found[1].scores(last))


def test_a_rotary_out_of_sight_is_said_to_be() -> None:
    shape = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    model = make_hf("deepseek_v3", num_key_value_heads=4, first_k_dense_replace=2, **shape)
    found = score_statistics(model, TOKENS, 100)
    assert found.without_rotary is None
    assert found.rotary.mean.isfinite().all()


def test_a_converted_model_is_measured_as_it_is() -> None:
    model = make_hf("llama")
    stock = model_statistics(model, TOKENS, [200], windows=1).at(200)
    factors = torch.tensor([[0.5, 1.0, 2.0, 1.0]] * 2)
    hf.convert(model, calibration=factors)
    layers: list[Layer] = []
    capture(model, TOKENS[None, :200], layers.append)
    S = layers[0].scores(torch.tensor([199]))[0, :, 0].flip(-1)  # [heads, distances]
    t = torch.arange(200, dtype=torch.float64)
    growth = (1 + t / 10).log()
    expected = (1 + 2 * growth).sqrt() * factors[0, :, None] * S - 2 * growth
    torch.testing.assert_close(layers[0].logits(torch.tensor([199]))[0, :, 0], expected)
    converted = model_statistics(model, TOKENS, [200], windows=1).at(200)
    assert (converted.entropy < stock.entropy).all()
    assert hf.conversion(model) is not None
    raw = score_statistics(model, TOKENS, 200, windows=1).rotary.variance[0]
    hf.revert(model)
    hf.convert(model)
    torch.testing.assert_close(raw, score_statistics(model, TOKENS, 200, windows=1).rotary.variance[0])


def test_calibration_of_scaled_scores_goes_into_a_conversion() -> None:
    model = make_hf("llama")
    one = calibrate(model, TOKENS, 200, windows=1)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight *= 3
    three = calibrate(model, TOKENS, 200, windows=1)
    torch.testing.assert_close(three[0], one[0] / 3)
    hf.convert(model, calibration=three)
    settings = hf.conversion(model)
    assert settings is not None
    assert settings.calibration is not None
    torch.testing.assert_close(torch.tensor(settings.calibration, dtype=torch.float64), three.scale)


def test_the_model_comes_back_as_it_was() -> None:
    model = make_hf("llama")
    before = model(TOKENS[None, :50]).logits
    implementation = model.config._attn_implementation
    from transformers.models.llama import modeling_llama

    rotary = modeling_llama.apply_rotary_pos_emb

    def fail(layer: Layer) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(model, TOKENS[None, :50], fail)
    assert modeling_llama.apply_rotary_pos_emb is rotary
    assert model.config._attn_implementation == implementation
    assert hf.conversion(model) is None
    torch.testing.assert_close(model(TOKENS[None, :50]).logits, before, rtol=0, atol=0)


def test_our_own_model_in_a_hugging_face_coat() -> None:
    from scaleinv.hf.gpt import ScaleInvGPTConfig, ScaleInvGPTForCausalLM

    shape = {"layers": 2, "width": 32, "heads": 2, "vocab_size": 61, "train_length": 64}
    model = ScaleInvGPTForCausalLM(ScaleInvGPTConfig(shape))
    found = model_statistics(model, TOKENS, [128])
    assert found.model == "scale-invariant-p-rope"
    torch.testing.assert_close(found.at(128).entropy, model_statistics(model.gpt, TOKENS, [128]).at(128).entropy)


def test_float_models_and_learned_positions() -> None:
    config = GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    found = model_statistics(model, TOKENS, [128], windows=1).at(128)
    assert 0 < found.entropy.min() <= found.entropy.max() < math.log(128)
    scores = score_statistics(model, TOKENS)
    assert scores.length == 128
    assert scores.without_rotary is not None
    torch.testing.assert_close(scores.without_rotary.variance, scores.rotary.variance)
    with pytest.raises(ValueError, match="lengths must be at most 128 for GPT2LMHeadModel"):
        model_statistics(model, TOKENS, [200])
