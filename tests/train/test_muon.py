import pytest
import torch

from scaleinv.train.muon import Muon, orthogonalize


@pytest.mark.parametrize("shape", [(16, 16), (48, 16), (16, 48)], ids=str)
def test_same_update_as_torch(shape):
    """torch's Muon iterates in bfloat16: ours in float32 must lie as near to it as bfloat16 allows."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = (
        Muon([ours], lr=0.02, momentum=0.95),
        torch.optim.Muon([theirs], lr=0.02, momentum=0.95, weight_decay=0.0, adjust_lr_fn="original"),
    )
    for _ in range(3):
        gradient = torch.randn(shape, generator=generator)
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    moved = (ours - start).norm()
    assert (ours - theirs).norm() < 0.03 * moved
    assert moved > 0.1


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 20, 7), (2, 5, 30)], ids=str)
def test_singular_values_come_near_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert ((values > 0.6) & (values < 1.3)).all()


def test_batch_equals_one_by_one():
    matrices = torch.randn(4, 12, 6, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([orthogonalize(matrix[None]) for matrix in matrices])
    torch.testing.assert_close(orthogonalize(matrices), alone)


def test_zero_gradient_moves_nothing():
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    parameter.grad = torch.zeros(4, 4)
    Muon([parameter]).step()
    assert torch.equal(parameter.detach(), torch.ones(4, 4))


def test_only_matrices_are_taken():
    with pytest.raises(ValueError, match="params must be matrices"):
        Muon([torch.nn.Parameter(torch.ones(3))])
