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
    cases,
    check,
    run,
)

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
