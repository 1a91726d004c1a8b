"""The oracle against torch's own attention, with logits written out anew."""

import math

import pytest
import torch
from torch.nn import functional as F

import scaleinv


def tensors(heads=4, queries=19, keys=19, dim=8, kv_heads=None, batch=2):
    torch.manual_seed(0)
    shape = (batch, kv_heads or heads, keys, dim)
    query, key, value = torch.randn(batch, heads, queries, dim), torch.randn(shape), torch.randn(shape)
    return query.double(), key.double(), value.double()


def softmax_of(logits, value):
    """torch's attention with the logits as its mask, and a query of zeros."""
    zeros = value.new_zeros(*logits.shape[:3], 8)
    return F.scaled_dot_product_attention(zeros, value.new_zeros(*value.shape[:3], 8), value, attn_mask=logits)


def scores_and_distances(query, key, offset=0):
    t = offset + torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])
    return query @ key.mT / math.sqrt(query.shape[-1]), t


def test_plain_is_torchs_causal_attention():
    query, key, value = tensors()
    out = scaleinv.attention(query, key, value, scaleinv.Plain(), backend="reference")
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, key, value, is_causal=True))


def test_plain_groups_heads_as_torch_does():
    query, key, value = tensors(heads=6, kv_heads=2)
    out = scaleinv.attention(query, key, value, scaleinv.Plain(), scale=0.3, backend="reference")
    want = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True, scale=0.3)
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("tau", [0.1, 10.0])
@pytest.mark.parametrize(("alpha", "beta"), [(math.e**0.5, math.e**0.5), (2.0, 3.0)])
@pytest.mark.parametrize("causal", [True, False])
def test_scale_invariant(tau, alpha, beta, causal):
    query, key, value = tensors()
    S, t = scores_and_distances(query, key)
    variance = 2 * (torch.log(t.abs().double() / tau + 1) - math.log(alpha) + beta / alpha)
    L = variance.sqrt() * S - variance + beta / alpha
    if causal:
        L = L.masked_fill(t < 0, -torch.inf)
    logits = scaleinv.ScaleInvariant(tau, alpha, beta)
    out, lse = scaleinv.attention(query, key, value, logits, causal=causal, backend="reference", return_lse=True)
    torch.testing.assert_close(out, softmax_of(L, value))
    torch.testing.assert_close(lse, L.logsumexp(-1))


def test_the_default_is_the_papers():
    query, key, value = tensors()
    S, t = scores_and_distances(query, key)
    log = torch.log(1 + t.clamp_min(0).double() / 10)
    L = (torch.sqrt(1 + 2 * log) * S - 2 * log).masked_fill(t < 0, -torch.inf)
    for backend in ("reference", "auto"):
        torch.testing.assert_close(scaleinv.attention(query, key, value, backend=backend), softmax_of(L, value))


def test_one_lengthscale_for_each_head():
    query, key, value = tensors(heads=3)
    taus = [0.5, 10.0, 200.0]
    out = scaleinv.attention(query, key, value, scaleinv.ScaleInvariant(taus), backend="reference")
    for h, tau in enumerate(taus):
        one = [x[:, h : h + 1] for x in (query, key, value)]
        alone = scaleinv.attention(*one, scaleinv.ScaleInvariant(tau), backend="reference")
        torch.testing.assert_close(out[:, h : h + 1], alone)


ALIBI_SLOPES = {  # printed by the code of the ALiBi paper (github.com/ofirpress/attention_with_linear_biases)
    6: [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8],
    8: [2.0**-n for n in range(1, 9)],
    12: [2.0**-n for n in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
}


@pytest.mark.parametrize("heads", ALIBI_SLOPES)
def test_alibi(heads):
    query, key, value = tensors(heads=heads)
    _, t = scores_and_distances(query, key)
    bias = -torch.tensor(ALIBI_SLOPES[heads], dtype=torch.float64)[:, None, None] * t
    want = F.scaled_dot_product_attention(query, key, value, attn_mask=bias.masked_fill(t < 0, -torch.inf))
    out = scaleinv.attention(query, key, value, scaleinv.ALiBi(heads), backend="reference")
    torch.testing.assert_close(out, want)


def test_logn_visible_folds_into_the_query():
    query, key, value = tensors(heads=3, queries=7, keys=12)
    scales = torch.tensor([0.2, 0.4, 1.3], dtype=torch.float64)
    logits = scaleinv.LogN(3).double()
    logits.scale.data.copy_(scales)
    seen = torch.arange(6, 13)  # query 0 stands at position 5 and sees 6 keys
    folded = query * scales[:, None, None] * seen.double().log()[:, None]
    mask = torch.ones(7, 12, dtype=torch.bool).tril(5)
    want = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask)
    torch.testing.assert_close(scaleinv.attention(query, key, value, logits, backend="reference"), want)


@pytest.mark.parametrize(
    ("options", "context"),
    [
        ({}, 12),
        ({"query_offset": 2}, 9),  # the queries stand at 2 … 8
        ({"window": 3}, 12),
        ({"causal": False, "query_offset": 2}, 12),
        ({"causal": False, "query_offset": 2, "window": 2}, 12),
    ],
    ids=str,
)
def test_logn_context_counts_keys_up_to_the_last_query(options, context):
    query, key, value = tensors(heads=3, queries=7, keys=12)
    logits = scaleinv.LogN(3, scale=0.5, counts="context").double()
    out = scaleinv.attention(query, key, value, logits, backend="reference", **options)
    factor = 0.5 * math.log(context)
    want = scaleinv.attention(query * factor, key, value, scaleinv.Plain(), backend="reference", **options)
    torch.testing.assert_close(out, want)
