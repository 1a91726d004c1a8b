"""FlexAttention's score_mod and mask_mod against the reference, run eagerly; and the backend, compiled."""

import gc

import pytest
import torch
from attention_cases import TRANSFORMS, Case
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import scaleinv
from scaleinv.ops import flex
from scaleinv.ops.call import checked
from scaleinv.ops.masks import Geometry

CPU = torch.device("cpu")
MASKED = [
    Case(40, 40, dim=32, batch=2, heads=4, kv_heads=2),
    Case(20, 40, dim=32, value_dim=48, causal=False),
    Case(40, 20, dim=32),
    Case(20, 40, dim=32, window=7, offset=30),
    Case(20, 40, dim=32, offset=-10, causal=False, window=12),
    Case(40, 40, dim=32, batch=2, documents="huge"),
    Case(40, 40, dim=32, batch=2, mask="blind"),
    Case(20, 40, dim=32, batch=2, heads=4, kv_heads=1, documents="scattered", mask="some", window=15, offset=9),
]
TRANSFORMED = [Case(20, 40, dim=32, batch=2, heads=4, kv_heads=2, mask="some", transform=name) for name in TRANSFORMS]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", [*MASKED, *TRANSFORMED], ids=str)
def test_the_formula(case):
    query, key, value = case.tensors(torch.float32)[:3]
    logits, options = case.logits().requires_grad_(False), case.options()
    want = scaleinv.attention(query, key, value, logits, backend="reference", return_lse=True, **options)

    call = checked(query, key, value, logits, return_lse=True, **options)
    visible = flex.mask_mod(call.geometry, call.document_ids, call.key_mask, CPU)
    block_mask = create_block_mask(visible, case.batch, None, case.queries, case.length, device="cpu")
    out, aux = flex_attention(
        query,
        key,
        value,
        score_mod=flex.score_mod(call),
        block_mask=block_mask,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    for x, y in zip((out, aux.lse), want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["scale-invariant", "logn-context"])
def test_the_backend(transform):
    case = Case(20, 40, dim=32, batch=2, heads=4, kv_heads=2, mask="blind", window=30, transform=transform)
    query, key, value = case.tensors(torch.float32)[:3]
    key_mask = case.options()["key_mask"]
    key, value = (x.masked_fill(~key_mask[:, None, :, None], torch.nan) for x in (key, value))
    with torch.no_grad():
        logits = case.logits()
        want = scaleinv.attention(query, key, value, logits, backend="reference", **case.options())
        got = scaleinv.attention(query, key, value, logits, backend="flex", **case.options())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


OBSTACLES = {
    "float64": ({"dtype": torch.float64}, {}),
    "no backward": ({"requires_grad": True}, {}),
    "logsumexp": ({}, {"return_lse": True}),
    "below 32": ({"dim": 31}, {}),
    "empty": ({"length": 0}, {}),
    "meta": ({"device": "meta"}, {}),
}


@pytest.mark.parametrize("reason", OBSTACLES)
def test_obstacles_raise_with_the_reason(reason):
    given, options = OBSTACLES[reason]
    given = dict(given)
    query = torch.zeros(1, 1, given.pop("length", 4), given.pop("dim", 32), **given)
    for function in (scaleinv.attention, scaleinv.which_backend):
        with pytest.raises(ValueError, match=f"backend='flex'.*{reason}"):
            function(query, query, query, backend="flex", **options)


def test_a_learnt_table_is_an_obstacle_but_not_without_gradients():
    query = torch.zeros(1, 2, 4, 32)
    logits = scaleinv.LogN(2)
    with pytest.raises(ValueError, match="no backward"):
        scaleinv.which_backend(query, query, query, logits, backend="flex")
    with torch.no_grad():
        assert scaleinv.which_backend(query, query, query, logits, backend="flex") == "flex"


class TestMaskCache:
    @pytest.fixture(autouse=True)
    def _empty(self, monkeypatch):
        monkeypatch.setattr(flex, "_masks", flex._MaskCache())

    @staticmethod
    def mask(document_ids=None, key_mask=None, window=None):
        return flex._block_mask(Geometry.of(8, 8, 0, True, window), document_ids, key_mask, CPU)

    def test_same_call_same_mask(self):
        ids, key_mask = torch.zeros(1, 8, dtype=torch.int64), torch.ones(1, 8, dtype=torch.bool)
        assert self.mask() is self.mask()
        assert self.mask(ids) is self.mask(ids)
        assert self.mask(ids, key_mask) is self.mask(ids, key_mask)
        assert self.mask(None, key_mask) is self.mask(None, key_mask)

    def test_other_call_other_mask(self):
        ids = torch.zeros(1, 8, dtype=torch.int64)
        masks = [self.mask(), self.mask(window=3), self.mask(ids), self.mask(ids.clone())]
        assert len({id(x) for x in masks}) == 4

    def test_a_write_makes_a_new_mask(self):
        ids = torch.zeros(1, 8, dtype=torch.int64)
        before = self.mask(ids)
        ids[:, 4:] = 1
        after = self.mask(ids)
        assert after is not before
        assert self.mask(ids) is after

    def test_a_new_tensor_at_an_old_address_is_not_the_old_one(self):
        for step in range(5):
            key_mask = torch.arange(8)[None] == step
            seen = self.mask(None, key_mask).mask_mod(0, 0, torch.tensor(7), torch.arange(8))
            assert seen.nonzero().flatten().tolist() == [step]
            del key_mask
            gc.collect()

    def test_is_bounded(self):
        for window in range(1, flex.KEPT_MASKS + 9):
            self.mask(window=window)
        assert len(flex._masks.kept) == flex.KEPT_MASKS

    def test_no_mask_where_all_is_visible(self):
        assert flex._block_mask(Geometry.of(8, 8, 0, False, None), None, None, CPU) is None

    def test_inference_tensors(self):
        with torch.inference_mode():
            ids = torch.zeros(1, 8, dtype=torch.int64)
            first = self.mask(ids)
            ids[:, 4:] = 1
            second = self.mask(ids)
        row = torch.tensor(7)
        assert first is not second
        assert second.mask_mod(0, 0, row, torch.arange(8)).tolist() == [False] * 4 + [True] * 4
