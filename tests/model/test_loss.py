"""The chunked loss against the formula: values, weighted gradients, autocast, and what it never holds."""

import pytest
import torch
from torch.nn import functional as F

from scaleinv.model import loss
from scaleinv.model.loss import linear_cross_entropy


def given(rows, dtype=torch.float64, vocabulary=53, width=7):
    torch.manual_seed(0)
    x = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    return x, weight, torch.randint(vocabulary, (rows,))


def formula(x, weight, targets):
    logits = x @ weight.T
    return logits.exp().sum(-1).log() - logits[torch.arange(len(targets)), targets]


@pytest.fixture(params=[1, 4, 10, 1000], ids="{} rows at once".format)
def rows_at_once(request, monkeypatch):
    monkeypatch.setitem(loss.CHUNK, "cpu", request.param * 53 + 3)
    return request.param


@pytest.mark.parametrize("rows", [0, 1, 10, 21])
def test_it_is_the_formula(rows, rows_at_once):
    x, weight, targets = given(rows)
    share = torch.randn(rows, dtype=torch.float64)
    got, want = linear_cross_entropy(x, weight, targets), formula(x, weight, targets)
    torch.testing.assert_close(got, want)
    grads = (torch.autograd.grad(y, (x, weight), share) for y in (got, want))
    for mine, exact in zip(*grads, strict=True):
        torch.testing.assert_close(mine, exact)


def test_large_logits(rows_at_once):
    x, weight, targets = given(21)
    with torch.no_grad():
        x *= 1e4
    got = linear_cross_entropy(x, weight, targets)
    torch.testing.assert_close(got, F.cross_entropy(x @ weight.T, targets, reduction="none"))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(got.sum(), (x, weight)))


def test_autocast_is_that_of_a_linear_layer(rows_at_once):
    x, weight, targets = given(21, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = linear_cross_entropy(x, weight, targets)
        want = F.cross_entropy(F.linear(x, weight).float(), targets, reduction="none")
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want)
    share = torch.randn(21)
    mine, plain = (torch.autograd.grad(y, (x, weight), share) for y in (got, want))
    torch.testing.assert_close(mine[0], plain[0])
    torch.testing.assert_close(mine[1], plain[1], atol=0.02, rtol=0.01)  # of bf16: summed chunk by chunk
    assert [grad.dtype for grad in mine] == [torch.float32, torch.float32]


def test_compiled(monkeypatch):
    monkeypatch.setitem(loss.CHUNK, "cpu", 10 * 53)
    x, weight, targets = given(21, torch.float32)
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    for function in (linear_cross_entropy, compiled):
        torch.testing.assert_close(function(x, weight, targets), formula(x, weight, targets))
    mine, exact = (torch.autograd.grad(f(x, weight, targets).sum(), (x, weight)) for f in (compiled, formula))
    torch.testing.assert_close(mine, exact, atol=1e-5, rtol=1e-5)


def test_logits_are_never_kept(monkeypatch):
    monkeypatch.setitem(loss.CHUNK, "cpu", 4 * 53)
    x, weight, targets = given(21)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda t: t):
        linear_cross_entropy(x, weight, targets)
    assert sorted(kept) == sorted([x.shape, weight.shape, targets.shape, (21,)])


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_input_gets_no_gradient(frozen, rows_at_once):
    x, weight, targets = given(21)
    leaf = (weight, x)[frozen]
    (x, weight)[frozen].requires_grad_(False)
    got = torch.autograd.grad(linear_cross_entropy(x, weight, targets).sum(), leaf)
    torch.testing.assert_close(got, torch.autograd.grad(formula(x, weight, targets).sum(), leaf))
