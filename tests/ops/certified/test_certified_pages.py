"""`CertifiedCache` as its caller sees it: growth, shapes, dtypes and errors."""

import copy

import pytest
import torch
from caches import certified, make_case, truth

import scaleinv
from scaleinv.ops.certified import CertifiedCache


def filled(keys=10, **arguments):
    cache = CertifiedCache(**arguments)
    cache.append(torch.randn(1, 2, keys, 8), torch.randn(1, 2, keys, 4))
    return cache


def test_token_by_token_is_the_same_as_at_once():
    case = make_case(0, kv_heads=2, keys=1100, dim=12)
    at_once, certificate = certified(case, 1e-2, "native")
    cache = CertifiedCache(case.logits, 1e-2, backend="native")
    for n in range(1100):
        cache.append(case.key[:, :, n : n + 1], case.value[:, :, n : n + 1])
    step_by_step, other = cache.attend(case.query)
    assert torch.equal(at_once, step_by_step)
    assert torch.equal(certificate.error, other.error)
    assert cache.length == 1100


def test_growing_moves_nothing():
    cache = filled(1000)
    address = cache.pages[0].key.data_ptr()
    cache.append(torch.randn(1, 2, 5000, 8), torch.randn(1, 2, 5000, 4))
    assert cache.pages[0].key.data_ptr() == address
    assert [x.shape[2] for x in cache.tensors()] == [6000, 6000]
    a_key = 8 * 4 + 4 * 4 + 8 + 2 * 4  # key, value, copy, step and residual
    assert cache.nbytes == len(cache.pages) * 2 * (1024 * a_key + 4 * 4 + 2 * 8)  # centre, radius and longest


def test_keys_may_lie_anywhere_in_memory():
    case = make_case(0, kv_heads=2, keys=50, dim=12)
    cache = CertifiedCache(backend="native")
    cache.append(case.key.transpose(1, 2).contiguous().transpose(1, 2), case.value.transpose(2, 3).contiguous().mT)
    assert torch.equal(cache.attend(case.query)[0], certified(case, 1e-3, "native")[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(dtype):
    case = make_case(0, keys=700)
    case.query, case.key, case.value = (x.to(dtype) for x in (case.query, case.key, case.value))
    out, certificate = certified(case, 1e-3, "auto")
    assert out.dtype == dtype
    error = (out.double() - truth(case)).norm(dim=-1)
    assert bool((error <= certificate.error).all())


def test_a_chunk_too_long_for_memory_is_taken_in_parts(monkeypatch):
    case = make_case(0, "negative", "logn", keys=400, queries=7)
    whole = certified(case, 1e-3, "native")
    monkeypatch.setattr("scaleinv.ops.certified.cache.ROW_BYTES", 4 * 2 * 400 * 2)
    parts = certified(case, 1e-3, "native")
    torch.testing.assert_close(whole[0], parts[0], rtol=0, atol=1e-6)


def test_queries_that_see_nothing_get_zeros():
    case = make_case(0, keys=40)
    case.key_mask = torch.zeros(1, 40, dtype=torch.bool)
    for backend in ("native", "torch"):
        out, certificate = certified(case, 1e-3, backend)
        assert bool((out == 0).all() & (certificate.error <= 1e-30).all() & (certificate.read == 1).all())


def test_the_package_exports_it():
    assert scaleinv.CertifiedCache is CertifiedCache


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tolerance": 1.0}, "tolerance must lie in"),
        ({"tolerance": -1e-3}, "tolerance must lie in"),
        ({"window": 0}, "window must be a positive integer"),
        ({"tolerance": float("nan")}, "tolerance must lie in"),
        ({"scale": float("nan")}, "scale must be a finite number"),
        ({"scale": "1"}, "scale must be a finite number"),
        ({"backend": "fast"}, "backend must be one of auto, native, torch"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        CertifiedCache(**arguments)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_infinite_keys_are_refused_and_change_nothing(backend):
    cache = filled(backend=backend)
    query = torch.randn(1, 4, 1, 8)
    before = cache.attend(query)[0]
    for bad in (torch.nan, torch.inf):
        key, value = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 4)
        key[0, 1, 2, 7] = bad
        with pytest.raises(ValueError, match="must be finite"):
            cache.append(key, value)
        with pytest.raises(ValueError, match="query must be finite"):
            cache.attend(query * bad)
    assert torch.equal(cache.attend(query)[0], before)


def test_a_refused_first_append_leaves_the_cache_empty():
    cache = CertifiedCache()
    with pytest.raises(ValueError, match="key and value must be finite"):
        cache.append(torch.full((1, 2, 3, 8), torch.nan), torch.zeros(1, 2, 3, 4))
    with pytest.raises(ValueError, match="the cache is empty"):
        cache.attend(torch.zeros(1, 2, 1, 8))
    cache.append(torch.zeros(1, 2, 3, 8).double(), torch.zeros(1, 2, 3, 4).double())
    assert cache.length == 3


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_is_a_cache_of_its_own(duplicate):
    cache = filled(1500)
    other, query = duplicate(cache), torch.randn(1, 4, 1, 8)
    assert torch.equal(cache.attend(query)[0], other.attend(query)[0])
    other.append(torch.randn(1, 2, 1, 8), 100 * torch.ones(1, 2, 1, 4))
    assert (cache.length, other.length) == (1500, 1501)
    assert not torch.equal(cache.attend(query)[0], other.attend(query)[0])


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_keys_with_a_shift_of_minus_infinity_do_not_count(backend):
    shift = torch.zeros(1, 1000)
    shift[:, 10:] = -torch.inf
    cache = CertifiedCache(scaleinv.DistanceTable(20 * torch.ones(1, 1000), shift), 0.5, backend=backend)
    key = torch.zeros(1, 1, 1000, 2)
    key[:, :, -1] = 1
    cache.append(key, torch.ones(1, 1, 1000, 2))
    assert float(cache.attend(torch.ones(1, 1, 1, 2))[1].read) == pytest.approx(0.1)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_transform_may_be_replaced(backend):
    """As `scaleinv.hf` does at each step."""
    cache, query = filled(50, logits=scaleinv.Plain(), backend=backend), torch.randn(1, 2, 1, 8)
    cache.attend(query)
    cache.logits = scaleinv.ALiBi(2)
    fresh = CertifiedCache(scaleinv.ALiBi(2), backend=backend)
    fresh.append(*cache.tensors())
    torch.testing.assert_close(cache.attend(query)[0], fresh.attend(query)[0])


@pytest.mark.parametrize(
    ("gain", "shift"), [(torch.nan, 0.0), (1.0, torch.nan), (1.0, torch.inf), (1e39, 0.0), (1.0, -1e39)]
)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_transforms_outside_of_float32_are_refused(backend, gain, shift):
    tables = (torch.full((1, 50), x, dtype=torch.float64) for x in (gain, shift))
    with pytest.raises(ValueError, match=r"logits .DistanceTable. must give gains in float32's range"):
        filled(10, logits=scaleinv.DistanceTable(*tables), backend=backend).attend(torch.randn(1, 2, 1, 8))


def test_errors_name_what_does_not_fit():
    with pytest.raises(ValueError, match="empty"):
        CertifiedCache().attend(torch.randn(1, 2, 1, 8))
    cache = filled()
    for query, message in (
        (torch.randn(1, 3, 1, 8), "multiple of 2 heads"),
        (torch.randn(1, 2, 11, 8), "1 … 10 positions"),
        (torch.randn(1, 2, 1, 9), "query must have shape"),
        (torch.randn(1, 2, 1, 8).double(), "query must be like the keys"),
        (torch.ones(1, 2, 1, 8, dtype=torch.long), "query must be like the keys"),
        (torch.empty(1, 2, 1, 8, device="meta"), "query must be like the keys.* on meta"),
        (torch.randn(1, 2, 1, 8).to_sparse(), "query must be a dense tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.attend(query)
    with pytest.raises(ValueError, match="key_mask must be a bool tensor"):
        cache.attend(torch.randn(1, 2, 1, 8), key_mask=torch.ones(1, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match="key_mask must be on cpu like the keys, got meta"):
        cache.attend(torch.randn(1, 2, 1, 8), key_mask=torch.ones(1, 10, dtype=torch.bool, device="meta"))
    with pytest.raises(TypeError, match="key must be float64, float32, bfloat16 or float16"):
        cache.append(torch.ones(1, 2, 1, 8).to(torch.float8_e4m3fn), torch.ones(1, 2, 1, 4).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="key must be a dense tensor"):
        cache.append(torch.empty(1, 2, 1, 8, device="meta"), torch.empty(1, 2, 1, 4, device="meta"))
    with pytest.raises(ValueError, match="at most 1e\\+60 in size"):
        CertifiedCache().append(torch.full((1, 1, 1, 1), 1e70, dtype=torch.float64), torch.ones(1, 1, 1, 1).double())
    with pytest.raises(TypeError, match="value must be a tensor, got list"):
        cache.append(torch.randn(1, 2, 1, 8), [1.0])
    with pytest.raises(ValueError, match="of those held"):
        cache.append(torch.randn(1, 2, 1, 6), torch.randn(1, 2, 1, 4))
    with pytest.raises(ValueError, match=r"native.*float64"):
        CertifiedCache(backend="native").append(torch.randn(1, 2, 1, 8).double(), torch.randn(1, 2, 1, 4).double())
