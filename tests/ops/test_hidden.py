"""What no backend lets through: hidden keys of any value, queries that see nothing, empty inputs; a NaN stays one."""

import math

import pytest
import torch
from attention_cases import EVERY, close, gradients, tensors

import scaleinv
from scaleinv.ops.masks import Geometry, pair_mask

every_backend = pytest.mark.parametrize("backend", EVERY)
# Tensor cores multiply whole tiles: there 0 × NaN reaches the other queries of the tile.
every_backend_that_multiplies_visible_pairs_only = pytest.mark.parametrize(
    "backend", [x for x in EVERY if x != "triton"]
)


HIDING = {
    "mask": {"key_mask": (torch.arange(70) % 3 > 0).expand(2, 70)},
    "mask-bidirectional": {"key_mask": (torch.arange(70) % 3 > 0).expand(2, 70), "causal": False},
    "mask-documents": {
        "key_mask": (torch.arange(70) % 3 > 0).expand(2, 70),
        "document_ids": (torch.arange(70) // 30).expand(2, 70),
    },
    "future": {"query_offset": 20, "rows": slice(20, 30)},
    "future-one": {"query_offset": 20, "rows": slice(20, 21)},
    "window": {"query_offset": 60, "rows": slice(60, 70), "window": 9},
    "window-documents": {
        "query_offset": 55,
        "rows": slice(55, 65),
        "window": 9,
        "document_ids": torch.zeros(2, 70, dtype=torch.int64),
    },
}


@every_backend
@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_hidden_keys_may_hold_anything(backend, hiding, garbage):
    options = dict(HIDING[hiding])
    rows = options.pop("rows", slice(0, 70))
    query, key, value = tensors()
    query = query[:, :, rows]
    hidden = ~options["key_mask"] if "key_mask" in options else torch.ones(2, 70, dtype=torch.bool)
    if "key_mask" not in options:
        hidden[:, max(0, rows.start - options.get("window", 99) + 1) : rows.stop] = False
    clean = gradients([query, key, value], backend, **options)
    spoilt = [x.masked_fill(hidden[:, None, :, None], garbage) for x in (key, value)]
    for got, want in zip(gradients([query, *spoilt], backend, **options), clean, strict=True):
        assert torch.equal(got, want)
    assert all(torch.all(x.movedim(2, 1)[hidden] == 0) for x in clean[3:])


SPOILT = 35
HIDDEN_FROM_SOME = {
    "causal": {},
    "window": {"window": 20},
    "window-bidirectional": {"window": 20, "causal": False},
    "documents": {"document_ids": (torch.arange(70) // 30).expand(2, 70)},
    "documents-bidirectional": {"document_ids": (torch.arange(70) % 3).expand(2, 70), "causal": False},
    "mask": {"key_mask": (torch.arange(70) % 4 > 0).expand(2, 70), "window": 30},
    "decoding": {"query_offset": 33, "rows": slice(33, 37)},
}


@every_backend_that_multiplies_visible_pairs_only
@pytest.mark.parametrize("hiding", HIDDEN_FROM_SOME)
@pytest.mark.parametrize("spoilt", ["key", "value"])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 3e38])
def test_a_key_that_some_queries_see_leaves_the_others_alone(backend, hiding, spoilt, garbage):
    options = dict(HIDDEN_FROM_SOME[hiding])
    rows = options.pop("rows", slice(0, 70))
    query, key, value = tensors()
    given = {"query": query[:, :, rows], "key": key, "value": value}
    clean = gradients(given.values(), backend, **options)
    given[spoilt] = given[spoilt].clone()
    given[spoilt][:, :, SPOILT] = garbage
    out, lse, grad_query, grad_key, grad_value = gradients(given.values(), backend, **options)

    geometry = Geometry.of(
        given["query"].shape[2], 70, options.get("query_offset", 0), options.get("causal", True), options.get("window")
    )
    visible = pair_mask(geometry, options.get("document_ids"), options.get("key_mask"), query.device)[0, 0]
    spared = ~visible[:, SPOILT]  # queries
    unread = ~visible[~spared].any(0)  # keys that no spoilt query sees
    assert spared.any()
    assert not spared.all()
    for got, want in zip((out, lse, grad_query), clean[:3], strict=True):
        close(got[:, :, spared], want[:, :, spared])
    for got, want in zip((grad_key, grad_value), clean[3:], strict=True):
        close(got[:, :, unread], want[:, :, unread])
    if math.isnan(garbage):
        assert out[:, :, ~spared].isnan().all()


@every_backend_that_multiplies_visible_pairs_only
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_reaches_only_what_its_query_sees(backend, garbage):
    document_ids = (torch.arange(70) // 35).expand(2, 70)

    def grads(change):
        leaves = [x.requires_grad_() for x in tensors()]
        out = scaleinv.attention(*leaves, document_ids=document_ids, backend=backend)
        incoming = torch.ones_like(out)
        incoming[:, :, 40] = change
        return torch.autograd.grad(out, leaves, incoming)

    for got, want in zip(grads(garbage), grads(1.0), strict=True):
        close(got[:, :, :35], want[:, :, :35])
        assert not got[:, :, 35:].isfinite().all()


@every_backend
@pytest.mark.parametrize("rows", [3, 70])
def test_a_query_that_sees_nothing_gets_zero(backend, rows):
    query, key, value = tensors(queries=rows)
    key_mask = torch.ones(2, 70, dtype=torch.bool)
    key_mask[1] = False
    out, lse, *grads = gradients([query, key, value], backend, key_mask=key_mask)
    assert torch.all(out[1] == 0)
    assert torch.all(lse[1] == -torch.inf)
    assert lse[0].isfinite().all()
    assert all(torch.all(g[1] == 0) and g.isfinite().all() for g in grads)


@every_backend
def test_queries_before_every_key_get_zero(backend):
    query, key, value = tensors(queries=70, keys=30)
    out, lse, *grads = gradients([query, key, value], backend)  # query i stands at i - 40
    assert torch.all(out[:, :, :40] == 0)
    assert torch.all(lse[:, :, :40] == -torch.inf)
    assert lse[:, :, 40:].isfinite().all()
    assert torch.all(grads[0][:, :, :40] == 0)
    assert all(g.isfinite().all() for g in grads)


@every_backend
@pytest.mark.parametrize("options", [{}, {"query_offset": -9}, {"query_offset": 9, "window": 3}], ids=str)
@pytest.mark.parametrize(("batch", "queries", "keys"), [(1, 0, 0), (1, 0, 5), (1, 5, 0), (0, 5, 5), (0, 0, 0)])
def test_empty(backend, batch, queries, keys, options):
    leaves = [x.requires_grad_() for x in tensors(batch=batch, queries=queries, keys=keys)]
    logits = scaleinv.ScaleInvariant(heads=4, learnable=True)
    out, lse = scaleinv.attention(*leaves, logits, backend=backend, return_lse=True, **options)
    assert out.shape == (batch, 4, queries, 12)
    assert torch.all(out == 0)
    assert torch.all(lse == -torch.inf)
    out.sum().backward()
    for x in (*leaves, logits.log_tau):
        assert x.grad.shape == x.shape
        assert torch.all(x.grad == 0)


@every_backend
@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_visible_nan_is_not_hidden(backend, rows, which, masked):
    given = dict(zip(("query", "key", "value"), tensors(queries=rows), strict=True))
    given[which][0, 0, -1 if which == "query" else 0] = torch.nan
    key_mask = None
    if masked:  # the NaN comes first and everything after it is hidden
        key_mask = torch.zeros(2, 70, dtype=torch.bool)
        key_mask[:, 0] = True
    out = scaleinv.attention(**given, key_mask=key_mask, backend=backend)
    assert out[0, 0, -1].isnan().all()
    assert out[1].isfinite().all()
