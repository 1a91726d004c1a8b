"""The paper's optimisers: Muon for the blocks' matrices, Adam for the embedding, the output and the scalars."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scaleinv.train.config import TrainConfig
from scaleinv.train.muon import Muon

_MODEL = "model."  # prefix of a weight's name, as "optimizer." is of a state's


def build_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Muon and Adam over all of the GPT's parameters; each group keeps its peak rate as ``initial_lr``."""
    matrices, embedding, others = [], [], []
    for name, parameter in model.named_parameters():
        if name.startswith("embedding."):
            embedding.append(parameter)
        elif name.startswith("blocks.") and parameter.dim() == 2:
            matrices.append(parameter)
        else:
            others.append(parameter)
    groups = [
        {"params": embedding, "lr": config.lr_embedding},
        {"params": others, "lr": config.lr_output},
    ]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=config.lr_matrices, momentum=config.momentum),
        torch.optim.Adam(groups, betas=config.betas, fused=True),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def step(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """One step of all optimisers, with every learning rate at ``factor`` of its peak; then drop the gradients."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def initialize_states(optimizers: list[torch.optim.Optimizer]) -> None:
    """Create the states as before the first step, so that a checkpoint can be read into them."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if optimizer.state[parameter]:
                    continue
                if isinstance(optimizer, Muon):
                    optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
                else:
                    optimizer.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


def state_tensors(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Weights and optimiser states under plain names: the live tensors, for saving and for loading into."""
    initialize_states(optimizers)
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors = as_states({name: tensor.detach() for name, tensor in model.state_dict().items()})
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                tensors[f"optimizer.{names[parameter]}.{key}"] = value
    return tensors


def as_states(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model's weights under the names that `state_tensors` gives them."""
    return {_MODEL + name: tensor for name, tensor in weights.items()}


def weights_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's weights among `state_tensors`, under the model's own names."""
    return {name.removeprefix(_MODEL): tensor for name, tensor in tensors.items() if name.startswith(_MODEL)}
