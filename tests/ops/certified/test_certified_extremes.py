"""A search for numbers that break a certificate: the whole range of floats, every form of the kernel, 80-bit truth."""

import itertools
import random

import numpy as np
import pytest
import torch

import scaleinv
from scaleinv.ops.build import FLAGS, build
from scaleinv.ops.certified import CertifiedCache, native

FORMS = {"native": (), "avx2": ("-mno-avx512f",), "plain": ("-mno-avx512f", "-mno-avx2", "-mno-avx", "-mno-fma")}
TOLERANCES = (0.0, 1e-12, 1e-6, 1e-3, 0.1, 0.5, 0.9, 0.999)


@pytest.fixture(params=[*FORMS, "subnormal numbers flushed", "torch"])
def backend(request, monkeypatch):
    if request.param in FORMS:
        kernel = build(native.SOURCE, native.Kernel, (*FLAGS, *FORMS[request.param]))
        if isinstance(kernel, str):
            pytest.skip(kernel)
        monkeypatch.setattr(native, "load", lambda: kernel)
    elif request.param != "torch" and not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush subnormal numbers")
    yield "torch" if request.param == "torch" else "native"
    torch.set_flush_denormal(False)


def numbers(choice, generator, shape, hard):
    """Numbers of one of several kinds; hard ones reach the ends of float32's range."""
    x = generator.standard_normal(shape)
    kind = choice(("normal", "whole", "outlier", "sparse") + ("scaled", "powers", "levels", "ends", "rows") * hard)
    if kind == "whole":
        x = np.rint(50 * x)
    elif kind == "outlier":
        x[..., 0] *= 10 ** generator.uniform(0, 6)
    elif kind == "sparse":
        x *= generator.random(shape) < 0.2
    elif kind == "scaled":
        x *= 10 ** generator.uniform(-44, 37)
    elif kind == "powers":
        x = np.sign(x) * 2 ** np.rint(6 * x)
    elif kind == "levels":  # exactly representable in 8 bits
        x = np.rint(np.clip(40 * x, -127, 127))
        x[..., 0] = 127
    elif kind == "ends":
        x = np.sign(x) * choice((3.4e38, 1e30, 1e12, 1e-30, 1e-38, 1e-44))
    elif kind == "rows":
        x *= 10 ** (10 * generator.standard_normal((*shape[:-1], 1)))
    return torch.tensor(x.clip(-3.4e38, 3.4e38), dtype=torch.float32)


def transform(choice, generator, heads, keys):
    name = choice(("scale-invariant", "plain", "alibi", "logn", "table", "table"))
    if name == "logn":
        return scaleinv.LogN(heads, scale=float(choice((0.0, 0.4, -2.0))))
    if name != "table":
        return {"scale-invariant": scaleinv.ScaleInvariant, "plain": scaleinv.Plain}.get(
            name, lambda: scaleinv.ALiBi(heads)
        )()
    a = generator.standard_normal((heads, keys)) * 10.0 ** choice((0, 0, -20, -42, 8))
    m = generator.standard_normal((1, keys)) * choice((0, 1, 1000))
    a[:, generator.random(keys) < choice((0, 0.3))] = 0
    m[:, generator.random(keys) < choice((0, 0.4))] = choice((-np.inf, -1e30))
    return scaleinv.DistanceTable(torch.tensor(a), torch.tensor(m))


def truth(query, key, value, logits, scale, window, mask):
    """Output and weights in numpy's longdouble: on x86, 64 bits of mantissa and 15 of exponent."""
    (batch, heads, queries, _), keys = query.shape, key.shape[2]
    query, key, value = (x.numpy().astype(np.longdouble) for x in (query, key, value))
    a, m = (x.detach().numpy() for x in logits.tables(keys, dtype=torch.float64, device=torch.device("cpu")))
    weights = np.zeros((batch, heads, queries, keys), np.longdouble)
    out = np.zeros((batch, heads, queries, value.shape[3]), np.longdouble)
    for b, h, i in itertools.product(range(batch), range(heads), range(queries)):
        t = keys - queries + i - np.arange(keys)
        seen = (t >= 0) & (t < window) & mask[b].numpy()
        kv = h * key.shape[1] // heads
        score = (key[b, kv] * query[b, h, i]).sum(-1) * np.longdouble(scale)
        if logits.counts:
            score = score * logits.query_gain(torch.tensor([[int(seen.sum())]])).detach().double().numpy().flat[h]
        row = np.where(seen, a[h % len(a)][t.clip(0)] * score + m[h % len(m)][t.clip(0)], -np.inf)
        if row.max() > -np.inf:
            weight = np.exp(row - row.max())
            weights[b, h, i] = weight / weight.sum()
            out[b, h, i] = (weights[b, h, i][:, None] * value[b, kv]).sum(0)
    return out, weights


def attack(seed, backend):
    generator, choice = np.random.default_rng(seed), random.Random(seed).choice
    kv_heads, keys = choice((1, 2)), choice((1, 2, 16, 17, 40, 300, 1024, 1500))
    batch, heads, queries = choice((1, 2)), kv_heads * choice((1, 3)), min(keys, choice((1, 4)))
    dim, width = choice((1, 3, 16, 20)), choice((1, 2, 17))
    hard = choice((0, 1))
    query = numbers(choice, generator, (batch, heads, queries, dim), hard)
    key = numbers(choice, generator, (batch, kv_heads, keys, dim), hard)
    value = numbers(choice, generator, (batch, kv_heads, keys, width), choice((0, 1)))
    scale = choice((1.0, -1.0, 1e-3, 1e30, 1e-30, 0.0, None, None, None))
    if scale is None:  # scores of an ordinary size, from whatever numbers
        scale = choice((1, 10, 1e4)) / max(float(query.abs().max()) * float(key.abs().max()), 1e-50)
    window = choice((None, None, 7, keys + 3))
    mask = torch.tensor(generator.random((batch, keys)) < choice((0.05, 0.9, 2, 2)))
    logits, tolerance = transform(choice, generator, heads, keys), choice(TOLERANCES)
    exact, weights = truth(query, key, value, logits, scale, window or keys, mask)

    cache = CertifiedCache(logits, tolerance, scale=scale, window=window, backend=backend)
    cut = int(generator.integers(0, keys + 1))
    cache.append(key[:, :, :cut], value[:, :, :cut])
    cache.append(key[:, :, cut:], value[:, :, cut:])
    out, certificate = cache.attend(query, key_mask=mask)
    error = np.sqrt(((out.numpy() - exact) ** 2).sum(-1))
    assert bool(out.isfinite().all())
    assert (error <= certificate.error.numpy()).all(), (error, certificate.error)
    assert bool(((certificate.mass >= 0) & (certificate.mass <= tolerance)).all())
    if keys <= 300:  # with the identity for values, the output shows what was read
        cache = CertifiedCache(logits, tolerance, scale=scale, window=window, backend=backend)
        cache.append(key, torch.eye(keys).expand(batch, kv_heads, keys, keys))
        out, certificate = cache.attend(query, key_mask=mask)
        outside = (weights * (out == 0).numpy()).sum(-1)
        assert (outside <= certificate.mass.numpy() + 1e-30).all(), (outside, certificate.mass)


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="longdouble is no wider than float64 here")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("count", [60, pytest.param(4000, marks=pytest.mark.exhaustive)])
def test_no_numbers_break_a_certificate(backend, count):
    for seed in range(count):
        attack(seed, backend)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_mean_of_the_largest_values_is_finite(backend):
    largest = torch.finfo(torch.float32).max
    cache = CertifiedCache(scaleinv.Plain(), 0.5, backend=backend)
    cache.append(torch.zeros(1, 1, 3000, 4), torch.full((1, 1, 3000, 4), largest))
    out, certificate = cache.attend(torch.ones(1, 1, 1, 4))
    torch.testing.assert_close(out, torch.full((1, 1, 1, 4), largest))
    assert float(certificate.error) < 1e-3 * largest
