"""The C kernel: what it cannot serve, and that threads do not change its results."""

import pytest
import torch
from attention_cases import NATIVE

import scaleinv

needs_kernel = pytest.mark.skipif(not NATIVE, reason="no C compiler")


def test_obstacles():
    for kind in ({"dtype": torch.float64}, {"device": "meta"}):
        query = torch.zeros(1, 1, 1, 1, **kind)
        with pytest.raises(ValueError, match=r"blocked-native.*(float64|meta)"):
            scaleinv.which_backend(query, query, query, backend="blocked-native")


@needs_kernel
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("rows", [1, 300])
def test_threads(batch, rows):
    """The same numbers from 1 and 2 threads, bit for bit; but for the gradient of the query (and the tables) when key
    heads × batch do not divide among the threads: then it is summed in parts."""
    torch.manual_seed(0)
    given = [torch.randn(batch, heads, n, 32) for heads, n in ((4, rows), (1, 300), (1, 300))]
    logits = scaleinv.ScaleInvariant(heads=4, learnable=True)

    def outputs(threads):
        torch.set_num_threads(threads)
        leaves = [x.clone().requires_grad_() for x in given]
        out, lse = scaleinv.attention(*leaves, logits, backend="blocked-native", return_lse=True)
        query, key, value, tau = torch.autograd.grad(out.square().sum() + lse.sum(), [*leaves, logits.log_tau])
        return {"out": out, "lse": lse, "key": key, "value": value, "query": query, "tau": tau}

    try:
        one, two = outputs(1), outputs(2)
    finally:
        torch.set_num_threads(1)
    for name in one:
        if batch % 2 == 0 or name not in ("query", "tau"):
            assert torch.equal(one[name], two[name]), name
        torch.testing.assert_close(one[name], two[name])


@needs_kernel
def test_a_long_decoding_step_spans_many_chunks():
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 2, 33), torch.randn(1, 2, 5000, 33), torch.randn(1, 2, 5000, 20)
    for options in ({}, {"window": 3000}, {"key_mask": torch.arange(5000)[None] % 3000 < 500}):
        exact = scaleinv.attention(*(x.double() for x in (query, key, value)), backend="reference", **options)
        out = scaleinv.attention(query, key, value, backend="blocked-native", **options)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
