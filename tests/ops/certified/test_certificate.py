"""The certificate holds: on generated caches and on adversaries, for the kernel and its twin."""

import hypothesis
import pytest
import torch
from caches import KINDS, LOGITS, assert_certified, certified, make_case, truth
from hypothesis import strategies as st

import scaleinv
from scaleinv.ops.certified import CertifiedCache

BACKENDS = ("native", "torch")


@st.composite
def cases(draw):
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    keys = draw(st.one_of(st.integers(1, 80), st.integers(81, 2600)))
    case = make_case(
        draw(st.integers(0, 2**32)),
        draw(st.sampled_from(KINDS)),
        draw(st.sampled_from(LOGITS)),
        batch=draw(st.sampled_from((1, 2))),
        heads=kv_heads * draw(st.sampled_from((1, 2, 3))),
        kv_heads=kv_heads,
        keys=keys,
        queries=draw(st.integers(1, min(keys, 5))),
        dim=draw(st.sampled_from((1, 3, 8, 33, 64))),
        value_dim=draw(st.sampled_from((1, 7, 32))),
    )
    case.window = draw(st.one_of(st.none(), st.integers(1, keys + 10)))
    if draw(st.booleans()):
        generator = torch.Generator().manual_seed(keys)
        case.key_mask = torch.rand(case.key.shape[0], keys, generator=generator) < draw(st.sampled_from((0.02, 0.7)))
    return case


@hypothesis.settings(max_examples=250, deadline=None, derandomize=True)
@hypothesis.given(
    case=cases(), tolerance=st.sampled_from((0.0, 1e-6, 1e-3, 1e-2, 0.3, 0.9)), parts=st.sampled_from((1, 2, 5))
)
def test_the_certificate_holds(case, tolerance, parts):
    for backend in BACKENDS:
        assert_certified(case, tolerance, backend, min(parts, case.key.shape[2]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_adversaries_over_several_pages(kind, backend):
    for seed in range(3):
        case = make_case(seed, kind, keys=5000 + seed, dim=32, heads=4, kv_heads=2)
        assert_certified(case, 1e-3, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_of_the_unread_is_below_the_mass(kind, backend):
    """With the identity for values, an output lists the weights of the keys that were read, and 0 for all others."""
    for seed, logits in enumerate(LOGITS):
        keys = 1000  # an open page, whose centre is 0
        case = make_case(seed, kind, logits, heads=2, kv_heads=1, keys=keys, queries=2, dim=16)
        case.value = torch.eye(keys)[None, None]
        out, certificate = certified(case, 1e-2, backend)
        weights = truth(case)
        outside = (weights * (out == 0)).sum(-1)
        assert bool((outside <= certificate.mass + 1e-9).all())  # weights below 1e-38 are 0 and still read
        counted = (out != 0).sum(-1)
        visible = torch.tensor([keys - 1, keys])
        assert bool((counted <= certificate.read * visible + 1e-6).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("keys", "factor"), [(1000, 40), (4096, 75), (16_384, 125)])
def test_the_error_is_close_to_the_true_one(backend, keys, factor):
    """The factors are those of docs/decoding.md."""
    for seed, kind in enumerate(("gaussian", "negative")):
        case = make_case(seed, kind, heads=4, kv_heads=4, keys=keys, dim=64, value_dim=64)
        for tolerance in (1e-2, 1e-3):
            out, certificate = certified(case, tolerance, backend)
            saved = certificate.read < 1
            error = (out.double() - truth(case)).norm(dim=-1)
            assert bool(saved.any())
            assert bool((certificate.error <= factor * error)[saved].all()), certificate.error / error


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mass_is_at_most_3_times_the_true_one(backend):
    for seed, kind in enumerate(("gaussian", "negative", "gaussian", "negative")):
        case = make_case(seed, kind, heads=4, kv_heads=4, keys=1000, dim=64)
        case.value = torch.eye(1000).expand(1, 4, 1000, 1000)
        out, certificate = certified(case, 1e-2, backend)
        outside = (truth(case) * (out == 0)).sum(-1)
        saved = certificate.read < 1
        assert bool(saved.any())
        assert bool((certificate.mass <= 3 * outside)[saved].all()), certificate.mass / outside


@pytest.mark.parametrize("backend", BACKENDS)
def test_tolerance_0_is_exact_attention(backend):
    case = make_case(0, heads=4, kv_heads=2, keys=3000, queries=3, dim=40)
    out, certificate = certified(case, 0.0, backend)
    assert bool((certificate.read == 1).all() & (certificate.mass == 0).all())
    torch.testing.assert_close(out.double(), truth(case), rtol=0, atol=1e-6)
    assert float(certificate.error.max()) < 1e-4 * float(case.value.norm(dim=-1).max())


@pytest.mark.parametrize("backend", BACKENDS)
def test_plain_attention_reads_everything_and_says_so(backend):
    case = make_case(0, logits="plain", keys=2000)
    _, certificate = certified(case, 1e-3, backend)
    assert bool((certificate.read == 1).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_needle_among_many_is_found_and_little_else_is_read(backend):
    case = make_case(1, "needle", heads=1, keys=20_000, dim=64)
    out, certificate = assert_certified(case, 1e-3, backend)
    assert float(certificate.read.max()) < 0.02
    assert float(out.mean()) > 500


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_query_head_of_a_group_reads_its_own_keys(backend):
    case = make_case(2, heads=4, kv_heads=1, keys=800, dim=32)
    case.value = torch.eye(800)[None, None]
    out, certificate = certified(case, 1e-2, backend)
    sets = (out[0, :, 0] != 0).tolist()
    assert len({tuple(row) for row in sets}) == 4
    assert bool((certificate.read < 1).all())


def test_the_kernel_reads_no_more_than_its_twin():
    """But for its bins, a tenth of a weight wide. It may read less: it tries an estimate of the total weight first."""
    for kind in ("gaussian", "negative", "outlier channel", "shared value"):
        case = make_case(3, kind, heads=4, kv_heads=2, keys=6000, dim=64)
        shares = [certified(case, 1e-3, backend)[1].read.mean() for backend in BACKENDS]
        assert float(shares[0] / shares[1]) < 1.2, (kind, shares)


def test_a_head_that_saves_nothing_is_not_bounded_for_a_while():
    """Certificates do not change by it: only the time does."""
    case = make_case(0, logits="plain", keys=1500)
    cache = CertifiedCache(case.logits, 1e-3, backend="native")
    cache.append(case.key, case.value)
    for _ in range(6):
        out, certificate = cache.attend(case.query)
        assert bool(((out.double() - truth(case)).norm(dim=-1) <= certificate.error).all())
        assert bool((certificate.read == 1).all())


@pytest.mark.slow
def test_ten_million_keys():
    case = make_case(5, "negative", heads=1, kv_heads=1, keys=10_000_000, dim=4, value_dim=2)
    out, certificate = certified(case, 1e-3, "native")
    a, m = scaleinv.schedule.coefficients(torch.arange(10_000_000).flip(0), tau=10.0)
    logits = a * (case.key[0, 0].double() @ case.query[0, 0, 0].double() / 2) + m
    exact = logits.softmax(0) @ case.value[0, 0].double()
    assert float((out[0, 0, 0].double() - exact).norm()) <= float(certificate.error)
    assert float(certificate.mass) <= 1e-3
