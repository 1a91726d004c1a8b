"""The GPT with a certified cache: exact at tolerance 0, and within what its layers' certificates say."""

import pytest
import torch
from small_gpt import TOKENS, decode, small

from scaleinv import methods
from scaleinv.model import CertifiedKVCache


@pytest.mark.parametrize("method", [name for name in methods.names() if not methods.row(name).infini])
@torch.no_grad()
def test_tolerance_0_gives_the_full_logits(method):
    model = small(method)
    pieces = torch.cat(decode(model, CertifiedKVCache(0.0, context_length=90), [7, 1, 1, 30, 1, 50]), 1)
    torch.testing.assert_close(pieces, model(TOKENS), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_prompt_and_a_longer_piece_get_exact_attention(monkeypatch):
    monkeypatch.setattr(CertifiedKVCache, "CHUNK", 4)
    model = small("scale-invariant-p-rope")
    pieces = torch.cat(decode(model, CertifiedKVCache(0.0), [40, 1, 30, 3, 16]), 1)
    torch.testing.assert_close(pieces, model(TOKENS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["rope+ntk", "yarn"])
@torch.no_grad()
def test_a_stretched_rotary_never_leaves_stale_keys(method):
    model = small(method)
    cache, sizes, start = CertifiedKVCache(0.0), [20, 12, 1, 1, 30, 1], 0
    for piece, size in zip(decode(model, cache, sizes), sizes, strict=True):
        start += size
        torch.testing.assert_close(piece, model(TOKENS[:, :start])[:, -size:], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_every_layer_has_a_certificate_within_the_tolerance():
    model = small("scale-invariant-p-rope")
    cache = CertifiedKVCache(0.05)
    decode(model, cache, [60, 1])
    assert sorted(cache.certificates) == list(range(len(model.blocks)))
    for certificate in cache.certificates.values():
        assert certificate.mass.shape == (2, model.config.heads, 1)
        assert bool((certificate.mass <= 0.05).all())


@pytest.mark.parametrize("method", ["scale-invariant-p-rope", "rope+ntk", "yarn"])
@torch.no_grad()
def test_a_fork_goes_on_from_an_earlier_place(method):
    model = small(method)
    cache = CertifiedKVCache(0.0)
    decode(model, cache, [60])
    past = cache.fork(torch.tensor([1]), 50)
    logits = model(TOKENS[1:, 50:90], cache=past)
    torch.testing.assert_close(logits, model(TOKENS[1:])[:, 50:], rtol=1e-4, atol=1e-4)
    assert cache.length == 60


@torch.no_grad()
def test_a_cache_with_half_a_step_is_refused():
    model = small("scale-invariant-p-rope")
    cache = CertifiedKVCache(0.0)
    decode(model, cache, [40])
    with pytest.raises(ValueError, match="key_mask must be"):
        model(TOKENS[:, 40:41], cache=cache, key_mask=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="part of a step that failed"):
        model(TOKENS[:, 40:41], cache=cache)
    cache.reset()
    torch.testing.assert_close(model(TOKENS, cache=cache), model(TOKENS), rtol=1e-4, atol=1e-4)


def test_infini_attention_is_refused():
    with pytest.raises(ValueError, match="no keys of the past to certify"):
        small("infini-rope")(TOKENS, cache=CertifiedKVCache(1e-3))
