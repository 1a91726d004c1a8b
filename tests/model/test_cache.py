import pytest
import torch
from small_gpt import TOKENS, decode, small

from scaleinv import methods
from scaleinv.model import KVCache


@pytest.mark.parametrize("kind", ["dynamic", "preallocated"])
@pytest.mark.parametrize("method", methods.names())
@torch.no_grad()
def test_cached_logits_equal_full_logits(method, kind):
    """With the final length known, every piece; 90 tokens are almost three times the training length."""
    model = small(method)
    cache = KVCache(capacity=90 if kind == "preallocated" else None, context_length=90)
    pieces = torch.cat(decode(model, cache, [7, 1, 1, 30, 1, 50]), 1)
    torch.testing.assert_close(pieces, model(TOKENS), rtol=1e-4, atol=1e-4)
    assert cache.length == 90


@pytest.mark.parametrize("method", ["rope+ntk", "yarn", "logn+ntk", "scale-invariant-rope+yarn"])
@torch.no_grad()
def test_a_stretched_rotary_never_leaves_stale_keys(method):
    """Without the final length, each piece equals a full forward over the text so far."""
    model = small(method)
    sizes = [20, 12, 1, 1, 30, 1]
    cache, start = KVCache(), 0
    for piece, size in zip(decode(model, cache, sizes), sizes, strict=True):
        start += size
        torch.testing.assert_close(piece, model(TOKENS[:, :start])[:, -size:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [(20, 5), (30, 10)], ids=["within the training length", "rotating the past again"])
@torch.no_grad()
def test_a_step_that_failed_can_be_repeated_with_a_stretched_rotary(sizes, monkeypatch):
    model, cache = small("yarn"), KVCache()
    first, second = TOKENS[:, : sizes[0]], TOKENS[:, sizes[0] : sum(sizes)]
    model(first, cache=cache)
    with monkeypatch.context() as broken:
        broken.setattr(model.blocks[1], "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(second, cache=cache)
    again = model(second, cache=cache)
    torch.testing.assert_close(again, model(TOKENS[:, : sum(sizes)])[:, sizes[0] :], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_full_forward_can_be_told_the_context_length():
    model = small("rope+ntk")
    cache = KVCache(context_length=200)
    pieces = torch.cat(decode(model, cache, [40, 50]), 1)
    torch.testing.assert_close(pieces, model(TOKENS, context_length=200), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(pieces, model(TOKENS), atol=1e-2)


@torch.no_grad()
def test_reset_forgets_the_text():
    model = small()
    cache = KVCache(capacity=90)
    decode(model, cache, [30, 1])
    cache.reset()
    torch.testing.assert_close(decode(model, cache, [10])[0], model(TOKENS[:, :10]), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_full_cache_says_so():
    model = small()
    with pytest.raises(ValueError, match="capacity of the cache is 8 tokens, but the text has reached 9"):
        decode(model, KVCache(capacity=8), [8, 1])


def test_bad_sizes():
    with pytest.raises(ValueError, match="capacity must be positive"):
        KVCache(capacity=0)
    with pytest.raises(ValueError, match="document_ids cannot be used with a cache"):
        small()(TOKENS, cache=KVCache(), document_ids=torch.zeros_like(TOKENS))
