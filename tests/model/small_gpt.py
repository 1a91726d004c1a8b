"""A small GPT, and decoding it token by token."""

import torch

from scaleinv.model import GPT, GPTConfig, KVCache

TOKENS = torch.randint(0, 50, (2, 90), generator=torch.Generator().manual_seed(5))


def small(method: str = "scale-invariant-p-rope", **changes: object) -> GPT:
    """A model of random weights: a fresh one has zeros where they would hide mistakes."""
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(
            **{"layers": 2, "width": 32, "heads": 2, "vocab_size": 50, "train_length": 32, **changes, "method": method}
        )
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def decode(model, cache: KVCache, sizes: list[int]) -> list[torch.Tensor]:
    """Logits of consecutive pieces of TOKENS."""
    start, pieces = 0, []
    for size in sizes:
        pieces.append(model(TOKENS[:, start : start + size], cache=cache))
        start += size
    return pieces
