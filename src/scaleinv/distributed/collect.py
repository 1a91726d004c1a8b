"""`shard` and `gather`: a whole tensor to a rank's part of it, and back. Both are differentiable.

A whole tensor is *replicated*: every rank holds the same values and computes the same thing with it. So the gradient of
`shard` is gathered from all ranks, and the gradient of `gather` is this rank's part of the incoming gradient.
These are the rules of torch's DTensor.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from scaleinv.distributed.agreement import Choice, check_agreement
from scaleinv.distributed.exchange import all_parts
from scaleinv.distributed.layout import LAYOUTS, Layout, Split


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
    split = Split(part.shape[dim] * ranks, ranks, layout)
    values: dict[str, float | Choice] = {
        "dim": dim,
        "layout": Choice(layout, LAYOUTS),
        f"dtype (a checksum, here of {part.dtype})": crc32(str(part.dtype).encode()),
        "the number of dimensions": part.dim(),
        **{f"dimension {number}": size for number, size in enumerate(part.shape)},
    }
    check_agreement(mesh, "gather", values, part.device)
    return _Gather.apply(part, mesh, dim, split)


def size_of(mesh: DeviceMesh) -> int:
    """How many ranks share a sequence. ValueError unless the mesh has one dimension and holds this rank."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f'mesh must have one dimension, got {mesh.ndim}: take one by its name, as in mesh["cp"]')
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh does not hold this process (rank {dist.get_rank()})")
    return mesh.size()


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, dim: int, split: Split) -> Tensor:
        ctx.settings = mesh, dim, split
        return split.take(x, mesh.get_local_rank(), dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Gather.apply(grad, *ctx.settings), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: DeviceMesh, dim: int, split: Split) -> Tensor:
        ctx.settings = mesh, dim, split
        return split.join(all_parts(part, mesh), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Shard.apply(grad, *ctx.settings), None, None, None


def _dimension(x: Tensor, dim: int) -> int:
    if not isinstance(x, Tensor):
        raise TypeError(f"shard and gather take a tensor, got {type(x).__name__}")
    if not isinstance(dim, int):
        raise TypeError(f"dim must be an integer, got {dim!r}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must lie in {-x.dim()} … {x.dim() - 1} for a tensor of {x.dim()} dimensions, got {dim}")
    return dim % x.dim()
