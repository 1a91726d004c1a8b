"""A model that reads its windows as a decoder with a certified cache does, for `evaluate` and for study."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scaleinv import methods
from scaleinv.model import GPT, CertifiedKVCache
from scaleinv.ops.certified import Certificate


class CertifiedReader(nn.Module):
    """The losses of a GPT whose attention leaves at most ``tolerance`` of the softmax weight unread.

    Windows are read a chunk at a time, each chunk against the cache of what precedes it (teacher-forced).

    Args:
        tolerance: as in `scaleinv.CertifiedCache`.
        keep: keep the certificates of the last window in `certificates`.
    """

    def __init__(self, model: GPT, tolerance: float, *, keep: bool = False) -> None:
        super().__init__()
        self.model, self.tolerance, self.keep = model, tolerance, keep
        self.certificates: dict[int, Certificate] = {}
        """By layer, ``[B, H, N]``."""
        self.queries, self.share = 0, 0.0

    @property
    def read(self) -> float:
        """The mean share of the visible keys that was read in full, over all queries, heads and layers so far."""
        return self.share / max(self.queries, 1)

    def forward(self, tokens: Tensor, targets: Tensor, *, document_ids: Tensor | None = None) -> Tensor:
        """The loss of each target ``[B, N]`` in nats."""
        if document_ids is not None:
            raise ValueError("tolerance cannot be used with document masks: a cache holds one document")
        cache = CertifiedKVCache(self.tolerance, context_length=tokens.shape[1])
        losses: list[Tensor] = []
        steps: list[dict[int, Certificate]] = []
        for piece, target in zip(tokens.split(cache.CHUNK, 1), targets.split(cache.CHUNK, 1), strict=True):
            losses.append(self.model(piece, target, cache=cache))
            steps.append(dict(cache.certificates))
            for certificate in cache.certificates.values():
                self.queries += certificate.read.numel()
                self.share += float(certificate.read.sum())
        if self.keep:
            self.certificates = {layer: _joined([step[layer] for step in steps]) for layer in steps[0]}
        return torch.cat(losses, 1)


def check_tolerance(tolerance: float | None, method: str) -> None:
    """ValueError for a tolerance out of its range, or for a method that keeps nothing to certify; None is fine."""
    if tolerance is None:
        return
    CertifiedKVCache(tolerance)
    if methods.row(method).infini:
        raise ValueError(f"tolerance cannot be used with {method!r}: Infini-attention keeps no keys to certify")


def _joined(parts: list[Certificate]) -> Certificate:
    mass, error, read = (torch.cat([getattr(part, name) for part in parts], 2) for name in ("mass", "error", "read"))
    return Certificate(mass, error, read)
