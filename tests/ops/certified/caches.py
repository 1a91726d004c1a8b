"""Caches to certify: ordinary ones, and ones made to break a bound; and the truth about them in float64."""

import dataclasses
import math

import torch
from torch import Tensor

import scaleinv
from scaleinv.ops.certified import Certificate, CertifiedCache

KINDS = ("gaussian", "negative", "outlier channel", "huge keys", "tiny keys", "equal keys", "needle", "zero keys")
KINDS += ("mixed norms", "shared value", "one channel", "opposite keys", "zero query", "cancelling")
LOGITS = ("scale-invariant", "plain", "alibi", "logn", "table")


@dataclasses.dataclass
class Case:
    query: Tensor  # [B, H, Nq, D]
    key: Tensor  # [B, KV, N, D]
    value: Tensor
    logits: scaleinv.LogitTransform
    window: int | None = None
    key_mask: Tensor | None = None


def make_case(
    seed,
    kind="gaussian",
    logits="scale-invariant",
    batch=1,
    heads=2,
    kv_heads=1,
    keys=500,
    queries=1,
    dim=16,
    value_dim=8,
):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    query, key = normal(batch, heads, queries, dim), normal(batch, kv_heads, keys, dim)
    value = normal(batch, kv_heads, keys, value_dim)
    direction = query[:, :: heads // kv_heads, -1:]
    place = int(torch.randint(keys, (), generator=generator))
    if kind == "negative":
        key -= 1.5 * direction * math.sqrt(dim) / direction.square().sum(-1, keepdim=True)
    elif kind == "outlier channel":
        key[..., 0] *= 300
    elif kind == "huge keys":
        key *= 1e4
    elif kind == "tiny keys":
        key *= 1e-35
    elif kind == "equal keys":
        key = key[:, :, :1].expand(-1, -1, keys, -1).clone()
    elif kind == "needle":
        key[:, :, place] = 8 * direction[:, :, 0]
        value[:, :, place] = 1000
    elif kind == "zero keys":
        key.zero_()
    elif kind == "mixed norms":
        key *= 10 ** (4 * normal(batch, kv_heads, keys, 1))
        query *= 1e-3
    elif kind == "shared value":
        value += 50
    elif kind == "one channel":
        key[..., 1:] = 0
    elif kind == "opposite keys":
        key[:, :, 1::2] = -key[:, :, : keys // 2 * 2 : 2][:, :, : key[:, :, 1::2].shape[2]]
    elif kind == "cancelling":  # scores that are small differences of large numbers
        query[..., :2], key[..., :2] = 300.0, 300.0
        key[..., 1:2] = -300.0
    elif kind == "zero query":
        query.zero_()
    transform = {
        "scale-invariant": lambda: scaleinv.ScaleInvariant(),
        "plain": lambda: scaleinv.Plain(),
        "alibi": lambda: scaleinv.ALiBi(heads),
        "logn": lambda: scaleinv.LogN(heads),
        "table": lambda: scaleinv.DistanceTable(normal(heads, keys), 3 * normal(1, keys)),
    }[logits]()
    return Case(query, key, value, transform)


def certified(case: Case, tolerance: float, backend: str, parts: int = 1) -> tuple[Tensor, Certificate]:
    cache = CertifiedCache(case.logits, tolerance, window=case.window, backend=backend)
    for key, value in zip(case.key.chunk(parts, 2), case.value.chunk(parts, 2), strict=True):
        cache.append(key, value)
    return cache.attend(case.query, key_mask=case.key_mask)


def truth(case: Case, value: Tensor | None = None) -> Tensor:
    """Exact attention in float64 on the same numbers."""
    value = case.value if value is None else value
    with torch.no_grad():
        return scaleinv.attention(
            case.query.double(),
            case.key.double(),
            value.double(),
            case.logits,
            window=case.window,
            key_mask=case.key_mask,
            backend="reference",
        )


def assert_certified(case: Case, tolerance: float, backend: str, parts: int = 1) -> tuple[Tensor, Certificate]:
    """The output is within the certificate of the truth, and the certificate within the tolerance."""
    out, certificate = certified(case, tolerance, backend, parts)
    error = (out.double() - truth(case)).norm(dim=-1)
    assert bool((error <= certificate.error).all()), (error, certificate.error)
    assert bool(((certificate.mass <= tolerance) & (certificate.mass >= 0)).all()), certificate.mass
    assert bool(((certificate.read >= 0) & (certificate.read <= 1)).all()), certificate.read
    assert bool((certificate.mass[certificate.read == 1] == 0).all())
    return out, certificate
