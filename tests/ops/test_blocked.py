"""The blocked algorithm, in torch and in C, against the reference: output, logsumexp and every gradient."""

import hypothesis
import pytest
import torch
from attention_cases import (
    DOCUMENTS,
    FAST,
    MASKS,
    NATIVE,
    TRANSFORMS,
    Case,
    assert_equal_to_rounding,
    check,
    run,
)
from hypothesis import strategies as st

SIZES = [
    *(
        Case(n, dim=d)
        for n, d in zip((1, 2, 5, 16, 63, 97, 111, 289, 300), (1, 3, 16, 33, 64, 128, 16, 33, 64), strict=True)
    ),
    *(Case(97, dim=d) for d in (1, 3, 16, 33, 64, 128)),
    Case(97, dim=16, value_dim=33),
    Case(63, dim=33, value_dim=1),
    Case(30, 289, batch=2),
    Case(1, 300, heads=3),
    Case(5, 289, heads=3, kv_heads=1),
    Case(289, 30),
    Case(97, 63, offset=0),
    Case(63, 97, offset=-20),
    Case(63, 97, offset=0),
    Case(63, 97, offset=60),
    Case(63, 97, offset=500),
    Case(63, 97, offset=-500),
    Case(111, batch=3, heads=6, kv_heads=1),
    Case(111, batch=2, heads=6, kv_heads=2),
    Case(111, heads=6, kv_heads=3),
]
VISIBILITY = [
    Case(111, causal=False),
    Case(63, 97, causal=False, offset=10),
    Case(289, window=1),
    Case(289, window=40),
    Case(300, 97, window=17),
    Case(111, window=5, causal=False),
    *(Case(111, batch=2, documents=kind) for kind in DOCUMENTS),
    Case(289, documents="packed", causal=False),
    Case(50, 289, documents="packed", window=60, offset=200),
    *(Case(111, batch=2, mask=kind) for kind in MASKS),
    Case(3, 300, batch=2, mask="blind"),
    Case(63, 111, batch=2, heads=4, kv_heads=2, documents="scattered", mask="some", window=30, offset=20),
    Case(63, 111, batch=2, heads=4, kv_heads=2, documents="huge", mask="blind", window=30, causal=False, offset=20),
]
SHAPES = [
    Case(111, batch=2, heads=6, kv_heads=3, dim=33),
    Case(40, 97, batch=2, heads=4, kv_heads=1, window=50, mask="some"),
    Case(4, 200, heads=4, kv_heads=1, documents="packed"),
    Case(63, 97, causal=False, offset=3, mask="blind", batch=2),
]
LEARNT = [Case(**(vars(case) | {"transform": name})) for name in TRANSFORMS for case in SHAPES]


@pytest.mark.parametrize("case", [*SIZES, *VISIBILITY, *LEARNT], ids=str)
class TestAgainstReference:
    def test_float64(self, case):
        assert_equal_to_rounding(run(case, "blocked-torch", torch.float64), run(case, "reference", torch.float64))

    @pytest.mark.parametrize("backend", FAST)
    def test_float32(self, case, backend):
        check(case, backend, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [*SIZES[4:8], Case(1, 300, heads=3), VISIBILITY[-1], *LEARNT], ids=str)
@pytest.mark.parametrize("backend", FAST)
def test_half_precision(case, backend, dtype):
    check(case, backend, dtype)


@st.composite
def cases(draw):
    """Any call: sizes, groups, offsets, masks and transform together."""
    queries, keys = draw(st.integers(1, 130)), draw(st.integers(1, 320))
    documents = draw(st.sampled_from([None, None, *DOCUMENTS]))
    offset = draw(st.none() | st.integers(-40, keys + 40))
    if documents:
        queries = min(queries, keys)
        offset = draw(st.none() | st.integers(0, keys - queries))
    kv_heads, groups = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (3, 2)]))
    return Case(
        queries,
        keys,
        dim=draw(st.sampled_from([1, 3, 8, 16, 33])),
        value_dim=draw(st.sampled_from([1, 7, 16, 40])),
        batch=draw(st.integers(1, 3)),
        heads=kv_heads * groups,
        kv_heads=kv_heads,
        transform=draw(st.sampled_from(list(TRANSFORMS))),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, 150)),
        offset=offset,
        documents=documents,
        mask=draw(st.sampled_from([None, *MASKS])),
        scale=draw(st.sampled_from([None, 0.3, -1.0])),
        seed=draw(st.integers(0, 1000)),
    )


@pytest.mark.slow
@hypothesis.settings(max_examples=120, deadline=None, derandomize=True)
@hypothesis.given(case=cases())
def test_any_call_float64(case):
    assert_equal_to_rounding(run(case, "blocked-torch", torch.float64), run(case, "reference", torch.float64))


@pytest.mark.slow
@pytest.mark.skipif(not NATIVE, reason="no C compiler")
@hypothesis.settings(max_examples=120, deadline=None, derandomize=True)
@hypothesis.given(case=cases())
def test_any_call_native(case):
    check(case, "blocked-native", torch.float32)
