import pytest
import torch

from scaleinv.train.passes import micro_batches, precision


@pytest.mark.parametrize(
    ("tokens", "rows"), [(None, [5]), (1, [1] * 5), (8, [1] * 5), (16, [2, 2, 1]), (20, [2, 2, 1]), (99, [5])]
)
def test_micro_batches_hold_no_more_than_asked(tokens, rows):
    first, second = torch.arange(40).reshape(5, 8), -torch.arange(40).reshape(5, 8)
    parts = micro_batches(first, second, device=torch.device("cpu"), tokens=tokens)
    assert [len(x) for x, _ in parts] == rows
    assert torch.equal(torch.cat([x for x, _ in parts]), first)
    assert torch.equal(torch.cat([y for _, y in parts]), second)


@pytest.mark.parametrize(
    ("asked", "dtype"),
    [("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)],
)
def test_a_cpu_computes_in_what_is_asked_for(asked, dtype):
    with precision(torch.device("cpu"), asked):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_computes_in_bfloat16():
    with precision(torch.device("cuda")):
        assert (torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")).dtype == torch.bfloat16
