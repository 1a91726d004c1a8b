"""Geometry, counts and diagonal tables against all pairs."""

import hypothesis
import pytest
import torch
from attention_cases import DOCUMENTS, MASKS, TRANSFORMS
from hypothesis import strategies as st

import scaleinv
from scaleinv.ops.masks import FAR, Geometry, pair_mask, query_documents, visible_counts

CPU = torch.device("cpu")


@st.composite
def geometries(draw, inside=False):
    keys = draw(st.integers(1, 20))
    queries = draw(st.integers(1, keys if inside else 20))
    offset = draw(st.integers(0, keys - queries) if inside else st.integers(-30, 40))
    return Geometry.of(queries, keys, offset, draw(st.booleans()), draw(st.none() | st.integers(1, 25)))


quick = hypothesis.settings(max_examples=200, deadline=None, derandomize=True)


@quick
@hypothesis.given(geometry=geometries())
def test_geometry_describes_its_pairs(geometry):
    t = geometry.distances(CPU)
    visible = geometry.visible(t)
    assert (geometry.first, geometry.last) == (t.min(), t.max())
    assert geometry.hides == (not visible.all())
    seen = visible.any(0).nonzero().flatten().tolist()
    low, high = geometry.key_range()
    assert 0 <= low <= high <= geometry.keys
    if seen:
        assert (low, high) == (seen[0], seen[-1] + 1)
        assert geometry.table_range() == (t[visible].abs().min(), t[visible].abs().max() + 1)
    else:
        assert low == high
        assert geometry.table_range() == (0, 1)
    sliced = geometry.sliced(low, high)
    assert torch.equal(sliced.visible(sliced.distances(CPU)), visible[:, low:high])


@quick
@hypothesis.given(
    geometry=geometries(), causal=st.booleans(), mask=st.sampled_from([None, *MASKS]), seed=st.integers(0, 99)
)
def test_counts(geometry, causal, mask, seed):
    torch.manual_seed(seed)
    key_mask = MASKS[mask](2, geometry.keys) if mask else None
    want = pair_mask(geometry, None, key_mask, CPU).sum(-1)[:, 0]
    assert torch.equal(visible_counts(geometry, None, key_mask, CPU), want)


@quick
@hypothesis.given(
    geometry=geometries(inside=True),
    documents=st.sampled_from(list(DOCUMENTS)),
    mask=st.sampled_from([None, *MASKS]),
    seed=st.integers(0, 99),
)
def test_counts_of_documents(geometry, documents, mask, seed):
    torch.manual_seed(seed)
    ids = DOCUMENTS[documents](2, geometry.keys)
    key_mask = MASKS[mask](2, geometry.keys) if mask else None
    want = pair_mask(geometry, ids, key_mask, CPU).sum(-1)[:, 0]
    assert torch.equal(visible_counts(geometry, ids, key_mask, CPU), want)


def test_pair_mask_by_hand():
    geometry = Geometry.of(queries=2, keys=4, offset=1, causal=True, window=2)
    ids, key_mask = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 1]]), torch.tensor([[True] * 4, [True, True, False, True]])
    want = [[[1, 1, 0, 0], [0, 1, 1, 0]], [[0, 1, 0, 0], [0, 1, 0, 0]]]
    assert torch.equal(pair_mask(geometry, ids, key_mask, CPU)[:, 0], torch.tensor(want, dtype=torch.bool))
    assert query_documents(ids, 1, 2).tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize("transform", TRANSFORMS)
@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(geometry=geometries())
def test_diagonal_tables(transform, geometry):
    torch.manual_seed(0)
    logits = TRANSFORMS[transform](3, 80)
    gain, shift = geometry.diagonal_tables(logits, torch.float64, CPU)
    assert gain.shape == shift.shape
    assert gain.is_contiguous()
    assert shift.is_contiguous()
    t = geometry.distances(CPU)
    a, m = logits.tables(80, dtype=torch.float64, device=CPU)
    place = geometry.queries - 1 - torch.arange(geometry.queries)[:, None] + torch.arange(geometry.keys)
    visible = geometry.visible(t)
    index = t.abs().clamp_max(79)
    torch.testing.assert_close(gain[:, place], torch.where(visible, a[:, index], 0.0).expand(len(gain), -1, -1))
    torch.testing.assert_close(shift[:, place], torch.where(visible, m[:, index], -torch.inf).expand(len(gain), -1, -1))


@pytest.mark.parametrize("offset", [-9, 0, 9])
@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 5), (5, 0)])
def test_empty_tables(queries, keys, offset):
    geometry = Geometry.of(queries, keys, offset, True, 3)
    gain, _ = geometry.diagonal_tables(scaleinv.Plain(), torch.float32, CPU)
    assert gain.shape == (1, max(queries + keys - 1, 0))


def test_a_window_larger_than_everything_is_no_window():
    assert Geometry.of(3, 3, 0, True, 2**80) == Geometry.of(3, 3, 0, True, None)
    assert Geometry.of(3, 3, 0, True, None).max_distance == FAR
