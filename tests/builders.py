"""Small models and texts that several test files need."""

import torch
from torch import nn

from scaleinv.analysis import Layer, capture
from scaleinv.model import GPT, GPTConfig


def make_gpt(method: str = "scale-invariant-p-rope", train_length: int = 64, **shape: int) -> GPT:
    """A tiny float64 GPT whose every weight is random: a fresh one has zeros in its output."""
    torch.manual_seed(0)
    shape = {"layers": 2, "width": 32, "heads": 2, "vocab_size": 50, **shape}
    model = GPT(GPTConfig(method=method, train_length=train_length, **shape)).double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model.eval()


def layers_of(model: nn.Module, tokens: torch.Tensor) -> list[Layer]:
    found: list[Layer] = []
    capture(model, tokens, found.append)
    return found
