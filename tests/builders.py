"""Small models and texts that several test files need."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from scaleinv.analysis import Layer, capture
from scaleinv.model import GPT, GPTConfig


def write_books(folder: Path, numbers: Iterable[int] = range(20), lines: int = 40) -> Path:
    """Small texts, no two alike, as ``000.txt`` and so on in a folder."""
    folder.mkdir(exist_ok=True)
    for number in numbers:
        text = "The quick brown fox jumps over the lazy dog; {} times it did so, and {} times it did not.\n"
        numbered = [text.format(number * 37 + line, line * line) for line in range(lines)]
        (folder / f"{number:03d}.txt").write_text("".join(numbered))
    return folder


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
