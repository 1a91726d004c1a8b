"""The kernel's parts against float64, and its forms for other CPUs."""

import ctypes
import math

import pytest
import torch
from caches import KINDS, assert_certified, certified, make_case

from scaleinv.ops.build import FLAGS, build
from scaleinv.ops.certified import native, pages
from scaleinv.ops.certified.cache import CertifiedCache


def test_the_exponential_is_within_4_units_in_the_last_place():
    x = torch.cat([-torch.logspace(-8, math.log10(87), 400_000), torch.linspace(-87, 0, 400_000)]).clamp_min(-87)
    y = torch.empty_like(x)
    native.load().library.scaleinv_exponential(
        ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(len(x))
    )
    exact = x.double().exp()
    assert float(((y - exact) / exact).abs().max()) < 4 * 2**-24


@pytest.mark.parametrize("dim", [1, 3, 16, 33, 128])
def test_kernel_and_twin_fill_the_same_pages(dim):
    case = make_case(0, "mixed norms", kv_heads=2, keys=1500, dim=dim, value_dim=5)
    caches = [CertifiedCache(backend=backend) for backend in ("native", "torch")]
    for cache in caches:
        cache.append(case.key[:, :, :700], case.value[:, :, :700])
        cache.append(case.key[:, :, 700:], case.value[:, :, 700:])
    for n, count in enumerate((1024, 476)):
        ours, twin = (cache.pages[n] for cache in caches)
        for cache in caches:
            page = cache.pages[n]
            part = slice(n * 1024, n * 1024 + count)
            assert torch.equal(page.key[:, :, :count], case.key[:, :, part])
            rest = (page.key.double() - pages.unpack(page))[:, :, :count].norm(dim=-1)
            assert bool((rest <= page.residual[:, :, :count]).all())
            assert bool((page.residual[:, :, :count] <= rest * (1 + 1e-5) + 1.01 * pages.FLUSHED).all())
            distance = (page.value[:, :, :count].double() - page.centre.double()[:, :, None]).norm(dim=-1)
            assert bool((distance <= page.radius[:, :, None]).all())
        close = (pages.unpack(ours) - pages.unpack(twin))[:, :, :count].abs()
        assert bool((close <= ours.step[:, :, :count, None] * 1.001).all())  # a tie may round to either side
        torch.testing.assert_close(ours.centre, twin.centre, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("flags", [("-mno-avx512f",), ("-mno-avx512f", "-mno-avx2", "-mno-avx")], ids=("avx2", "plain"))
def test_forms_for_other_cpus(flags, monkeypatch):
    kernel = build(native.SOURCE, native.Kernel, (*FLAGS, *flags))
    if isinstance(kernel, str):
        pytest.skip(kernel)
    case = make_case(0, heads=4, kv_heads=2, keys=5000, dim=36, queries=2)
    out, certificate = certified(case, 1e-3, "native")
    monkeypatch.setattr(native, "load", lambda: kernel)
    other, others = assert_certified(case, 1e-3, "native")
    torch.testing.assert_close(other, out, rtol=0, atol=1e-5)
    torch.testing.assert_close(others.read, certificate.read, rtol=0, atol=0.01)


@pytest.fixture
def three_threads():
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("logits", ["scale-invariant", "plain"])
@pytest.mark.parametrize("kind", KINDS)
def test_several_threads_certify_as_one(three_threads, kind, logits):
    case = make_case(1, kind, logits, heads=4, kv_heads=2, keys=9000, dim=32)
    _, certificate = assert_certified(case, 1e-3, "native")
    torch.set_num_threads(1)
    torch.testing.assert_close(certificate.read, certified(case, 1e-3, "native")[1].read)
