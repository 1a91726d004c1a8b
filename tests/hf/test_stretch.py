"""A model's own rotary stretched beyond its trained length: right frequencies, and one stretch for each context."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, GPT2LMHeadModel, PreTrainedModel, StaticCache

import scaleinv.hf
from hf_builders import make_hf
from scaleinv.cli import main
from scaleinv.hf import stretch
from scaleinv.rotary import RoPE, yarn

Stock = Callable[[str], PreTrainedModel]
TRAINED = 32


def stretched(model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    return scaleinv.hf.convert(model, **{"p": None, "stretch": "yarn", "train_length": TRAINED, **options})


@torch.no_grad()
def logits(model: PreTrainedModel, tokens: Tensor, **inputs: Any) -> Tensor:
    return model(tokens, **{"use_cache": False, **inputs}).logits


@pytest.fixture
def text() -> Tensor:
    return torch.randint(3, 61, (2, 100), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["scale-invariant", "logn"])
def test_it_is_yarn_without_the_attention_factor(text: Tensor, name: str) -> None:
    model, by_hand = stretched(make_hf("llama"), logits=name), make_hf("llama")
    train_length = TRAINED if name == "logn" else None
    scaleinv.hf.convert(by_hand, p=None, logits=name, train_length=train_length)
    expected = logits(by_hand, text[:, :TRAINED])
    assert torch.equal(logits(model, text[:, :TRAINED]), expected)
    for length in (33, 64, 100):
        rotary = yarn(RoPE(8), length, TRAINED, attention_factor=False)
        by_hand.model.rotary_emb.inv_freq = rotary.frequencies
        assert torch.equal(logits(model, text[:, :length]), logits(by_hand, text[:, :length]))
    assert torch.equal(logits(model, text[:, :TRAINED]), expected)  # and back again


def test_with_plain_logits_it_is_the_yarn_of_transformers(text: Tensor) -> None:
    scaling = {"rope_type": "yarn", "factor": 3.125, "original_max_position_embeddings": TRAINED, "rope_theta": 1e4}
    theirs = make_hf("llama", rope_parameters=scaling)
    ours = stretched(make_hf("llama"), logits="plain")
    expected = logits(theirs, text)
    assert (expected - logits(make_hf("llama"), text)).abs().max() > 1e-3
    torch.testing.assert_close(logits(ours, text), expected, atol=1e-6, rtol=0)  # their frequencies are in float32


def test_slowing_any_frequencies_agrees_with_yarn_on_those_of_rope() -> None:
    for dim, base, train_length in ((48, 1e4, 256), (64, 1e5, 2048), (128, 5e5, 8192), (8, 1e4, 32)):
        for length in (train_length + 1, 4 * train_length, 64 * train_length):
            expected = yarn(RoPE(dim, base), length, train_length).frequencies
            got = stretch.slowed(RoPE(dim, base).frequencies, length, train_length)
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("scaling", "trained"),
    [
        ({"rope_type": "linear", "factor": 2.0}, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        (
            {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            | {"original_max_position_embeddings": 16},
            64,
        ),
    ],
    ids=["linear", "yarn", "llama3"],
)
def test_scaled_models_are_stretched_from_their_extended_length(scaling: dict, trained: int, text: Tensor) -> None:
    parameters = {"rope_theta": 1e4, **scaling}
    model = make_hf("llama", max_position_embeddings=64, rope_parameters=parameters)
    own, factor = model.model.rotary_emb.inv_freq.float(), model.model.rotary_emb.attention_scaling
    stock = logits(model, text)
    stretched(model, train_length=None)
    conversion = scaleinv.hf.conversion(model)
    assert conversion is not None
    assert conversion.train_length == trained
    scaleinv.hf.stretch_to(model, trained)
    logits(model, text)
    assert torch.equal(model.model.rotary_emb.inv_freq.float(), own)
    scaleinv.hf.stretch_to(model, 8 * trained)
    logits(model, text)
    after = model.model.rotary_emb.inv_freq
    turns = trained * own / (2 * torch.pi)
    assert torch.equal(after[turns > 32], own[turns > 32])
    torch.testing.assert_close(after[turns < 1], own[turns < 1] / 8)
    assert bool((turns < 1).any())
    assert model.model.rotary_emb.attention_scaling == factor  # what the model was trained with
    assert scaleinv.hf.check(model, progress=None).ok
    scaleinv.hf.revert(model)
    assert torch.equal(model.model.rotary_emb.inv_freq.float(), own)
    assert torch.equal(logits(model, text), stock)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_other_scalings_are_refused(kind: str) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    more = {"factor": 2.0} | (factors if kind == "longrope" else {})
    model = make_hf("llama", rope_parameters={"rope_theta": 1e4, "rope_type": kind, **more})
    with pytest.raises(ValueError, match=rf"'{kind}', but stretch='yarn' takes default, linear, yarn, llama3"):
        stretched(model)
    assert scaleinv.hf.conversion(model) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"p": 0.5}, "p must be None, got 0.5"),
        ({"stretch": "ntk"}, "stretch must be one of yarn, or None, got 'ntk'"),
        ({"train_length": 1}, "train_length must be at least 2 with a stretch, got 1"),
    ],
)
def test_bad_arguments(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stretched(make_hf("llama"), **options)
    with pytest.raises(ValueError, match="no rotary module found in GPT2LMHeadModel"):
        stretched(GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2)))


def test_every_architecture(stock: Stock, model_type: str, text: Tensor, tmp_path: Path) -> None:
    model = stock(model_type)
    plain = logits(model, text)
    expected = logits(stretched(model), text)
    settings = scaleinv.hf.conversion(model)
    assert (expected - logits(scaleinv.hf.convert(stock(model_type), p=None), text)).abs().max() > 1e-3
    assert scaleinv.hf.check(model, length=40, progress=None).ok
    for trip in range(2):
        model.save_pretrained(tmp_path / str(trip))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / str(trip))
        assert scaleinv.hf.conversion(model) == settings
        assert torch.equal(logits(model, text), expected)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other, text), expected)
    assert torch.equal(logits(scaleinv.hf.revert(model), text), plain)
    assert not model.base_model._forward_pre_hooks
    assert not model.base_model._forward_hooks


def test_only_layers_that_look_far_are_stretched(stock: Stock, text: Tensor) -> None:
    model = stretched(stock("gemma3_text"))
    rotary = model.model.rotary_emb
    logits(model, text)
    assert torch.equal(rotary.sliding_attention_inv_freq, rotary.sliding_attention_original_inv_freq)
    assert not torch.equal(rotary.full_attention_inv_freq, rotary.full_attention_original_inv_freq)


def test_old_folders_load_and_new_ones_without_a_stretch_are_as_before(stock: Stock, tmp_path: Path) -> None:
    scaleinv.hf.convert(stock("llama"), p=None).save_pretrained(tmp_path)
    assert "stretch" not in json.loads((tmp_path / "config.json").read_text())["scaleinv"]
    assert not list(stretch.states(AutoModelForCausalLM.from_pretrained(tmp_path)))


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
def test_generating_with_a_cache_is_generating_without(text: Tensor, options: dict) -> None:
    """The stretch is that of the whole context from the first token on, and padding does not count against it."""
    model = stretched(make_hf("llama"))
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, :4] = 0
    common = {"attention_mask": mask, "max_new_tokens": 60, "do_sample": False, "eos_token_id": None, **options}
    cached = model.generate(text[:, :10], **common)
    common.pop("cache_implementation", None)
    assert torch.equal(cached, model.generate(text[:, :10], use_cache=False, **common))
    assert [state.room for state in stretch.states(model)] == [None]


def test_an_assistant_answers_in_the_context_of_the_answer(text: Tensor) -> None:
    """`generate` inside of `generate`: the greedy answer is that without an assistant."""
    model = stretched(make_hf("llama"))
    options = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    expected = model.generate(text[:1, :10], attention_mask=torch.ones(1, 10, dtype=torch.long), **options)
    found = model.generate(
        text[:1, :10], attention_mask=torch.ones(1, 10, dtype=torch.long), assistant_model=model, **options
    )
    assert torch.equal(found, expected)
    assert [state.room for state in stretch.states(model)] == [None]


def test_an_answer_of_no_given_length_ends_where_the_model_ends(text: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` then makes 20 tokens, but none beyond the trained length: nothing is stretched."""
    model = stretched(make_hf("llama"))
    model.config.max_position_embeddings = TRAINED
    opened = []
    room = stretch._room
    monkeypatch.setattr(stretch, "_room", lambda *given: opened.append(room(*given)) or opened[-1])
    for prompt in (5, TRAINED - 10):
        mask = torch.ones(1, prompt, dtype=torch.long)
        made = model.generate(text[:1, :prompt], attention_mask=mask, do_sample=False, eos_token_id=None)
        assert made.shape[1] == opened[-1] <= TRAINED


def test_cached_logits_equal_the_forward_at_the_same_stretch(text: Tensor) -> None:
    model = stretched(make_hf("llama"))
    answer = model.generate(
        text[:, :10], max_length=100, do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=1
    )
    full = logits(model, answer.sequences)[:, 9:-1]
    torch.testing.assert_close(torch.stack(answer.logits, 1), full.float())
    scaleinv.hf.stretch_to(model, 200)
    assert (logits(model, answer.sequences)[:, 9:-1] - full).abs().max() > 1e-3


def test_contexts_take_turns(text: Tensor) -> None:
    model = stretched(make_hf("llama"))
    expected, caches = {}, {}
    for length in (50, 90):
        scaleinv.hf.stretch_to(model, length)
        expected[length] = logits(model, text[:, :50])
        caches[length] = DynamicCache(config=model.config) if length == 50 else StaticCache(model.config, 60)
        logits(model, text[:, :40], use_cache=True, past_key_values=caches[length])
    scaleinv.hf.stretch_to(model, None)
    for place in range(40, 50):
        for length, cache in caches.items():
            step = logits(model, text[:, place : place + 1], use_cache=True, past_key_values=cache)
            torch.testing.assert_close(step[:, 0], expected[length][:, place])
            logits(model, text)  # somebody else's context


def test_a_cache_that_the_model_made_by_itself_is_remembered(text: Tensor) -> None:
    model = stretched(make_hf("llama"))
    scaleinv.hf.stretch_to(model, 90)
    expected = logits(model, text[:, :41])
    with torch.no_grad():
        cache = model(text[:, :40], return_dict=False)[1]
    scaleinv.hf.stretch_to(model, None)
    got = logits(model, text[:, 40:41], use_cache=True, past_key_values=cache)
    torch.testing.assert_close(got[:, 0], expected[:, 40])


def test_a_context_that_outgrows_its_stretch_keeps_it_and_says_so(
    text: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    model = stretched(make_hf("llama"))
    cache = DynamicCache(config=model.config)
    logits(model, text[:, :40], use_cache=True, past_key_values=cache)
    with caplog.at_level(logging.WARNING, "scaleinv"):
        for place in range(40, 44):
            last = logits(model, text[:, place : place + 1], use_cache=True, past_key_values=cache)
    assert caplog.text.count("opened for 40 tokens has 41") == 1
    scaleinv.hf.stretch_to(model, 40)
    torch.testing.assert_close(last[:, 0], logits(model, text[:, :44])[:, -1])


def test_keys_that_another_model_turned_are_refused(text: Tensor) -> None:
    stock, model = make_hf("llama"), stretched(make_hf("llama"))
    cache = DynamicCache(config=stock.config)
    logits(stock, text[:, :30], use_cache=True, past_key_values=cache)
    step = logits(model, text[:, 30:31], use_cache=True, past_key_values=cache)  # within the trained length all is one
    assert step.isfinite().all()
    cache = DynamicCache(config=stock.config)
    logits(stock, text[:, :40], use_cache=True, past_key_values=cache)
    with pytest.raises(ValueError, match="past_key_values must come from this model"):
        logits(model, text[:, 40:41], use_cache=True, past_key_values=cache)


def test_packed_documents_count_by_their_positions(text: Tensor) -> None:
    model = stretched(make_hf("llama"))
    positions = torch.arange(100)[None] % 25
    packed = logits(model, text, position_ids=positions)
    torch.testing.assert_close(packed[:, 75:], logits(model, text[:, 75:]))


@pytest.mark.slow
def test_compiles_with_a_fixed_length(text: Tensor) -> None:
    model = stretched(make_hf("llama"))
    scaleinv.hf.stretch_to(model, 100)
    expected = logits(model, text)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(text, use_cache=False).logits, expected)


def test_stretch_to_checks_its_arguments() -> None:
    model = stretched(make_hf("llama"))
    for length in (0, -5, 1.5, True):
        with pytest.raises(ValueError, match="length must be a positive number of tokens"):
            scaleinv.hf.stretch_to(model, length)
    with pytest.raises(ValueError, match="not converted with stretch='yarn'"):
        scaleinv.hf.stretch_to(make_hf("llama"), 64)


def test_the_command(stock: Stock, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    stock("llama").save_pretrained(tmp_path / "stock")
    arguments = ["convert", str(tmp_path / "stock"), "--stretch", "yarn", "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    conversion = scaleinv.hf.conversion(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert conversion is not None
    assert (conversion.stretch, conversion.p, conversion.train_length) == ("yarn", None, 256)
    assert main([*arguments, "--p", "0.5"]) == 2
    assert "--p 0.5 changes the rotary, which --stretch keeps" in capsys.readouterr().err
