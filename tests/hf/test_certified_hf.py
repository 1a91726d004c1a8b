"""`scaleinv.hf.CertifiedCache` in `generate`: the same tokens as without it, and clear errors where it cannot serve."""

import copy

import pytest
import torch
from transformers import DynamicCache

import scaleinv.hf

PROMPT = torch.randint(3, 61, (2, 30), generator=torch.Generator().manual_seed(0))
SETTINGS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}


def make(stock, model_type):
    model = stock(model_type)
    scaleinv.hf.convert(model, tau=5.0)
    return model


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt_neox", "olmo2", "smollm3", "mistral", "phi3"])
def test_tolerance_0_gives_the_same_tokens(stock, model_type):
    model = make(stock, model_type)
    exact = model.generate(PROMPT, past_key_values=DynamicCache(), **SETTINGS)
    cache = scaleinv.hf.CertifiedCache(0.0)
    assert torch.equal(model.generate(PROMPT, past_key_values=cache, **SETTINGS), exact)
    assert cache.get_seq_length() == exact.shape[1] - 1
    assert len(cache.certificates) == model.config.num_hidden_layers
    assert all(bool((certificate.read == 1).all()) for certificate in cache.certificates)


@torch.no_grad()
def test_a_step_is_within_the_tolerance(stock):
    model = make(stock, "llama")
    cache = scaleinv.hf.CertifiedCache(0.05)
    model(PROMPT[:, :29], past_key_values=cache)
    assert cache.certificates == [None, None]
    model(PROMPT[:, 29:], past_key_values=cache)
    for certificate in cache.certificates:
        assert certificate.mass.shape == (2, 4, 1)
        assert bool((certificate.mass <= 0.05).all())


def test_padding_on_the_left_changes_nothing(stock):
    model = make(stock, "llama")
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), PROMPT], 1)
    mask = (padded != 0).long()
    alone = model.generate(PROMPT, past_key_values=scaleinv.hf.CertifiedCache(0.0), **SETTINGS)
    out = model.generate(padded, attention_mask=mask, past_key_values=scaleinv.hf.CertifiedCache(0.0), **SETTINGS)
    assert torch.equal(out[:, 5:], alone)


def test_padding_between_tokens_is_refused(stock):
    model = make(stock, "llama")
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, 20:24] = 0
    with pytest.raises(ValueError, match="padding must be on the left"):
        model.generate(PROMPT, attention_mask=mask, past_key_values=scaleinv.hf.CertifiedCache(), **SETTINGS)


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss"])
def test_soft_caps_and_sinks_are_refused(stock, model_type):
    with pytest.raises(ValueError, match="does not support"):
        make(stock, model_type).generate(PROMPT, past_key_values=scaleinv.hf.CertifiedCache(), **SETTINGS)


def test_beams_are_refused(stock):
    with pytest.raises(ValueError, match="beam"):
        make(stock, "llama").generate(PROMPT, past_key_values=scaleinv.hf.CertifiedCache(), num_beams=2, **SETTINGS)


def test_assisted_decoding_is_refused(stock):
    with pytest.raises(ValueError, match="assisted decoding"):
        make(stock, "llama").generate(
            PROMPT[:1], past_key_values=scaleinv.hf.CertifiedCache(), prompt_lookup_num_tokens=3, **SETTINGS
        )


def test_a_cache_serves_several_turns_and_copies(stock):
    model = make(stock, "llama")
    cache = scaleinv.hf.CertifiedCache(0.0)
    first = model.generate(PROMPT, past_key_values=cache, **SETTINGS)
    text = torch.cat([first, PROMPT[:, :7]], 1)
    settings = {**SETTINGS, "attention_mask": torch.ones_like(text)}
    exact = model.generate(text, past_key_values=DynamicCache(), **settings)
    for held in (copy.deepcopy(cache), cache):
        assert torch.equal(model.generate(text, past_key_values=held, **settings), exact)
    cache.reset()
    assert torch.equal(model.generate(PROMPT, past_key_values=cache, **SETTINGS), first)


def test_a_stock_model_is_refused(stock):
    with pytest.raises(AttributeError, match=r"CertifiedCache serves models converted by scaleinv.hf.convert"):
        stock("llama").generate(PROMPT, past_key_values=scaleinv.hf.CertifiedCache(), **SETTINGS)


def test_a_bad_tolerance():
    with pytest.raises(ValueError, match="tolerance must lie in"):
        scaleinv.hf.CertifiedCache(2)
