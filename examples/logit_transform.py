"""A logit transform of your own, in one file: weights that fall off as a power of the distance.

    python examples/logit_transform.py

A `LogitTransform` fills in `tables`, the gain a and the shift m at distances 0, 1, 2, …. It then runs on every backend,
forward and backward, with GQA, windows, packed documents, caches and `torch.compile`, and over several ranks.
"""

import torch
from torch import Tensor, nn

import scaleinv


class PowerLaw(scaleinv.LogitTransform):
    """L = S − power_h · log(1 + t): a key's weight falls off as a power of its distance, learned by each head."""

    def __init__(self, heads: int, power: float = 1.0) -> None:
        super().__init__()
        self.heads = heads
        self.power = nn.Parameter(torch.full((heads,), power))

    def tables(self, length: int, *, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        distance = torch.arange(length, dtype=torch.float64, device=device)
        shift = -self.power.to(torch.float64)[:, None] * torch.log1p(distance)
        return torch.ones(1, length, dtype=dtype, device=device), shift.to(dtype)


def main() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 300, 64, dtype=torch.float64) for heads in (4, 2, 2))
    logits = PowerLaw(heads=4)
    exact = scaleinv.attention(query, key, value, logits, backend="reference")
    fast = scaleinv.attention(query, key, value, logits)
    print(f"difference from the reference: {(fast - exact).abs().max():.1e}")

    fast.square().mean().backward()
    print(f"gradient of the powers: {logits.power.grad.tolist()}")

    verdicts = scaleinv.analysis.verify(PowerLaw(heads=1), longest=2**15, samples=100)
    for name, verdict in verdicts.items():
        print(f"definition {name} {'holds' if verdict.holds else 'does not hold'}")


if __name__ == "__main__":
    main()
