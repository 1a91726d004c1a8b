"""Muon (Jordan et al. 2024): momentum, then each matrix's update made orthogonal by five Newton–Schulz steps.

The update is that of `torch.optim.Muon` (tested against it), with two differences that need our own class: on CPU the
iteration runs in float32, because bfloat16 is a hundred times slower there; and in a distributed run one rank
orthogonalises each matrix, gathered if it is sharded, and sends it to the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPSILON = 1e-7


class Muon(torch.optim.Optimizer):
    """Muon, for the matrices of the blocks.

    Args:
        params: 2-D parameters.
        lr: learning rate; a matrix with more rows than columns takes √(rows/columns) times as much.
        momentum: of the Nesterov momentum.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() != 2:
                    raise ValueError(f"params must be matrices, got shape {tuple(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter, update in zip(parameters, _orthogonal(self._momentum(group, parameters)), strict=True):
                rows, columns = parameter.shape
                parameter.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)
        return loss

    def _momentum(self, group: dict[str, Any], parameters: list[Tensor]) -> list[Tensor]:
        """Nesterov updates, sharded as the parameters are."""
        updates = []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffer, gradient = state["momentum_buffer"], parameter.grad
            assert gradient is not None
            buffer.lerp_(gradient, 1 - group["momentum"])
            updates.append(gradient.lerp(buffer, group["momentum"]))
        return updates


def orthogonalize(matrices: Tensor) -> Tensor:
    """Newton–Schulz on a batch ``[n, rows, columns]``: singular values come near 1."""
    x = matrices.to(torch.bfloat16 if matrices.device.type == "cuda" else torch.float32)
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(EPSILON)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.transpose(1, 2) if tall else x).to(matrices.dtype)


def _orthogonal(updates: list[Tensor]) -> list[Tensor]:
    """Make each update orthogonal. Matrices of one shape go together; several ranks share the work."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if world > 1 else 0
    whole = [update.full_tensor() if isinstance(update, DTensor) else update for update in updates]
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for index, update in enumerate(whole):
        by_shape[update.shape].append(index)
    for indices in by_shape.values():
        own = indices[rank::world]
        if own:
            for index, result in zip(own, orthogonalize(torch.stack([whole[i] for i in own])), strict=True):
                whole[index] = result.contiguous()
        if world > 1:
            for position, index in enumerate(indices):
                dist.broadcast(whole[index], src=position % world)
    return [
        distribute_tensor(full, update.device_mesh, update.placements, src_data_rank=None)
        if isinstance(update, DTensor)
        else full
        for full, update in zip(whole, updates, strict=True)
    ]
