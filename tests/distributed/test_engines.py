"""Every engine computes the blocks of a ring: a sequence cut in two gives what the reference gives of the whole."""

import pytest
import torch
from attention_cases import FAST, Case, check

from scaleinv.distributed.layout import Split
from scaleinv.distributed.plan import Plan
from scaleinv.distributed.ring import Ring, RingAttention
from scaleinv.ops import operator
from scaleinv.ops.masks import Geometry

ENGINES = [name for name in FAST if name in operator.ENGINES]
CASES = [
    Case(70, heads=4, kv_heads=2, value_dim=5, transform="learnable"),
    Case(47, causal=False, transform="table-heads", window=19),
    Case(70, documents="packed", mask="some", batch=2, transform="learnable"),
    Case(45, window=9, transform="plain"),
    Case(46, documents="scattered", window=30, causal=False, transform="alibi"),
    Case(50, mask="blind", batch=2, transform="scale-invariant-heads", scale=-0.5),
    Case(9, dim=4),
    Case(2, dim=4),
]


def run_in_blocks(case: Case, engine: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Output, logsumexp and gradients as `distributed.attention` computes them on one rank, which has two segments."""
    query, key, value, weights, lse_weights = case.tensors(dtype)
    leaves = {"query": query, "key": key, "value": value}
    for x in leaves.values():
        x.requires_grad_()
    logits = case.logits()
    plan = Plan(Split(case.queries, 1, "zigzag"), case.causal, case.window, *case.masks().values())
    whole = Geometry.of(case.queries, case.queries, 0, case.causal, case.window)
    tables = whole.diagonal_tables(logits, torch.float32, query.device)
    ring = Ring(plan, None, 0, engine, case.scale or case.dim**-0.5, None)
    out, lse = RingAttention.apply(query, key, value, *tables, ring)
    out = out.to(dtype)
    seen = lse.masked_fill(lse == -torch.inf, 0)
    ((out * weights).sum() + (seen * lse_weights).sum()).backward()
    grads = {f"grad {name}": x.grad for name, x in (leaves | dict(logits.named_parameters())).items()}
    return {"output": out.detach(), "logsumexp": lse.detach()} | grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("engine", [pytest.param(x, marks=[pytest.mark.slow] * (x == "triton")) for x in ENGINES])
def test_blocks_equal_the_whole(engine: str, case: Case, dtype: torch.dtype) -> None:
    check(case, engine, dtype, run_in_blocks)


@pytest.mark.parametrize("engine", ENGINES)
def test_keys_of_another_precision(engine: str) -> None:
    """A query that holds LogN's factor is float32, whatever its keys are."""
    query, key, value, _, _ = Case(20, dim=8).tensors(torch.bfloat16)
    plan = Plan(Split(20, 1, "zigzag"), True, None)
    tables = [table.expand(1, 39) for table in (torch.ones(1, 1), torch.zeros(1, 1))]
    hidden = torch.arange(39) > 19
    gain, shift = tables[0].masked_fill(hidden, 0), tables[1].masked_fill(hidden, -torch.inf)
    ring = Ring(plan, None, 0, engine, 0.5, None)
    scaled = query.float() * 1.001
    got, _ = RingAttention.apply(scaled, key, value, gain, shift, ring)
    want = torch.nn.functional.scaled_dot_product_attention(
        scaled.double(), key.double(), value.double(), is_causal=True, scale=0.5
    )
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
