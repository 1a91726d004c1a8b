"""Under autocast the inputs are cast, and nothing else is."""

import pytest
import torch
from attention_cases import EVERY

import scaleinv


def tensors():
    torch.manual_seed(0)
    return [x.clone().requires_grad_() for x in torch.randn(3, 1, 2, 40, 64)]


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("transform", ["scale-invariant", "logn"])
def test_autocast_is_a_cast_of_the_inputs(backend, backward_inside, transform):
    logits = scaleinv.LogN(2) if transform == "logn" else scaleinv.ScaleInvariant(heads=2, learnable=True)
    leaves = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = scaleinv.attention(*leaves, logits, backend=backend, return_lse=True)
        if backward_inside:
            out.float().square().sum().backward()
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    if not backward_inside:
        out.float().square().sum().backward()
    got = [*(x.grad for x in leaves), *(p.grad for p in logits.parameters())]

    logits.zero_grad()
    leaves = tensors()
    cast = [x.to(torch.bfloat16) for x in leaves]
    want, want_lse = scaleinv.attention(*cast, logits, backend=backend, return_lse=True)
    want.float().square().sum().backward()
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    if backend != "reference" or not backward_inside:  # the oracle's backward is autograd's own, matmul by matmul
        for x, y in zip(got, [*(x.grad for x in leaves), *(p.grad for p in logits.parameters())], strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("backend", ["reference", "blocked-torch"])
def test_autocast_leaves_float64_alone(backend):
    given = [x.double() for x in tensors()]
    with torch.autocast("cpu", torch.bfloat16):
        out = scaleinv.attention(*given, backend=backend)
    assert torch.equal(out, scaleinv.attention(*given, backend=backend))


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 40])
def test_dtypes_of_the_result(backend, dtype, rows):
    query, key, value = (x.to(dtype) for x in tensors())
    for logits in (None, scaleinv.LogN(2), scaleinv.LogN(2).to(dtype)):
        out, lse = scaleinv.attention(query[:, :, -rows:], key, value, logits, backend=backend, return_lse=True)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)


@pytest.mark.parametrize("backend", EVERY)
def test_logn_of_a_long_context_in_float16(backend):
    """70,000 keys do not fit into float16, nor do their logarithms need its few digits."""
    torch.manual_seed(0)
    query, key = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 70_000, 4)
    logits = scaleinv.LogN(1, scale=0.5)
    exact = scaleinv.attention(*(x.half().double() for x in (query, key, key)), logits, backend="reference")
    out = scaleinv.attention(*(x.half() for x in (query, key, key)), logits.half(), backend=backend)
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3)
