"""`shard` and `gather`: a whole tensor to a rank's part of it, and back. Both are differentiable.

A whole tensor is *replicated*: every rank holds the same values and computes the same thing with it. So the gradient of
`shard` is gathered from all ranks, and the gradient of `gather` is this rank's part of the incoming gradient.
These are the rules of torch's DTensor.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from scaleinv.distributed.exchange import check_agreement, explained
from scaleinv.distributed.layout import Layout, Split


def shard(x: Tensor, mesh: DeviceMesh, dim: int = 2, layout: Layout = "zigzag") -> Tensor:
    """This rank's part of a whole tensor, cut along ``dim``.

    Args:
        x: the same tensor on every rank of the mesh.
        mesh: a mesh of one dimension.
        dim: the dimension of the sequence; the number of ranks must divide it.
        layout: see `scaleinv.distributed.layout`.
    """
    dim = _dimension(x, dim)
    return _Shard.apply(x, mesh, dim, Split(x.shape[dim], size_of(mesh), layout))


def gather(part: Tensor, mesh: DeviceMesh, dim: int = 2, layout: Layout = "zigzag") -> Tensor:
    """The whole tensor, on every rank, from each rank's part of it: the inverse of `shard`."""
    dim = _dimension(part, dim)
    ranks = size_of(mesh)
    sizes = {"dimensions": part.dim(), f"dimension {dim}": part.shape[dim], "elements": part.numel()}
    check_agreement(mesh, sizes | {"bytes of an element": part.element_size()}, part.device)
    return _Gather.apply(part, mesh, dim, Split(part.shape[dim] * ranks, ranks, layout))


def size_of(mesh: DeviceMesh) -> int:
    """How many ranks share a sequence. ValueError unless the mesh has one dimension and holds this rank."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f'mesh must have one dimension, got {mesh.ndim}: take one by its name, as in mesh["cp"]')
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh does not hold this process (rank {dist.get_rank()})")
    return mesh.size()


def all_parts(part: Tensor, mesh: DeviceMesh) -> list[Tensor]:
    """Every rank's part, in the order of ranks."""
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(mesh.size())]
    with explained(f"rank {mesh.get_local_rank()} of the context mesh"):
        dist.all_gather(parts, part, group=mesh.get_group())
    return parts


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, dim: int, split: Split) -> Tensor:
        ctx.settings = mesh, dim, split
        return split.take(x, mesh.get_local_rank(), dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        mesh, dim, split = ctx.settings
        return split.join(all_parts(grad, mesh), dim), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: DeviceMesh, dim: int, split: Split) -> Tensor:
        ctx.settings = mesh, dim, split
        return split.join(all_parts(part, mesh), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        mesh, dim, split = ctx.settings
        return split.take(grad, mesh.get_local_rank(), dim).contiguous(), None, None, None


def _dimension(x: Tensor, dim: int) -> int:
    if not isinstance(x, Tensor):
        raise TypeError(f"shard and gather take a tensor, got {type(x).__name__}")
    if not isinstance(dim, int):
        raise TypeError(f"dim must be an integer, got {dim!r}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must lie in {-x.dim()} … {x.dim() - 1} for a tensor of {x.dim()} dimensions, got {dim}")
    return dim % x.dim()
