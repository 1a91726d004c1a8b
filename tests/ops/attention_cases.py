"""Calls of `attention` as data: made the same way for every backend and dtype, and compared by their errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import rounded
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import scaleinv
from scaleinv.ops import registry
from scaleinv.ops.call import DiagonalCall, checked


def _serves_all(backend: registry.Backend) -> bool:
    """Here, in float32, with gradients and the logsumexp."""
    tensors = (torch.zeros(1, 1, 1, 1, requires_grad=True) for _ in range(3))
    defaults = dict.fromkeys(("window", "document_ids", "key_mask", "query_offset", "scale"))
    return backend.module.obstacle(checked(*tensors, None, causal=True, return_lse=True, **defaults)) is None


EVERY = [backend.name for backend in registry.BACKENDS if _serves_all(backend)]
FAST = [name for name in EVERY if name != "reference"]
NATIVE = "blocked-native" in FAST

DOCUMENTS = {
    "packed": lambda batch, keys: torch.arange(keys).mul(3).div(max(keys, 1), rounding_mode="floor").repeat(batch, 1),
    "scattered": lambda batch, keys: torch.tensor([-3, 0, 7])[torch.randint(3, (batch, keys))],
    "huge": lambda batch, keys: torch.tensor([-(2**63), 2**63 - 1, 5])[torch.randint(3, (batch, keys))],
    "int32": lambda batch, keys: torch.randint(2, (batch, keys), dtype=torch.int32),
}


def _some(batch: int, keys: int) -> Tensor:
    return torch.rand(batch, keys) < 0.6


def _blind(batch: int, keys: int) -> Tensor:
    mask = _some(batch, keys)
    mask[0] = False
    return mask


MASKS = {"some": _some, "blind": _blind}


def _taus(heads: int) -> Tensor:
    return torch.linspace(0.5, 20, heads)


def _table(heads: int, length: int) -> Tensor:
    return nn.Parameter(torch.randn(heads, length))


TRANSFORMS = {
    "plain": lambda heads, length: scaleinv.Plain(),
    "scale-invariant": lambda heads, length: scaleinv.ScaleInvariant(tau=3.0),
    "scale-invariant-heads": lambda heads, length: scaleinv.ScaleInvariant(_taus(heads), alpha=1.2, beta=0.7),
    "fitted": lambda heads, length: scaleinv.FittedScaleInvariant(
        [0.5 - h for h in range(heads)], [0.3 + 2.0 * h for h in range(heads)], tau=3.0
    ),
    "learnable": lambda heads, length: scaleinv.ScaleInvariant(_taus(heads), heads=heads, learnable=True),
    "logn-visible": lambda heads, length: scaleinv.LogN(heads, scale=0.7),
    "logn-context": lambda heads, length: scaleinv.LogN(heads, scale=0.7, counts="context"),
    "alibi": lambda heads, length: scaleinv.ALiBi(heads),
    "table": lambda heads, length: scaleinv.DistanceTable(_table(1, length), _table(1, length)),
    "table-heads": lambda heads, length: scaleinv.DistanceTable(_table(heads, length), _table(heads, length)),
    "table-shift-heads": lambda heads, length: scaleinv.DistanceTable(_table(1, length), _table(heads, length)),
    "table-scale-heads": lambda heads, length: scaleinv.DistanceTable(_table(heads, length), _table(1, length)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `attention`; its tensors come from the seed."""

    queries: int
    keys: int | None = None
    dim: int = 16
    value_dim: int | None = None
    batch: int = 1
    heads: int = 2
    kv_heads: int | None = None
    transform: str = "scale-invariant"
    causal: bool = True
    window: int | None = None
    offset: int | None = None
    documents: str | None = None
    mask: str | None = None
    scale: float | None = None
    seed: int = 0

    def __str__(self) -> str:
        changed = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return "-".join(f"{f.name}={getattr(self, f.name)}" for f in changed)

    @property
    def length(self) -> int:
        """Keys."""
        return self.queries if self.keys is None else self.keys

    def tensors(self, dtype: torch.dtype) -> list[Tensor]:
        """query, key, value, and weights of the loss for output and logsumexp, rounded to dtype."""
        torch.manual_seed(self.seed)
        kv_heads = self.kv_heads or self.heads
        value_dim = self.value_dim or self.dim
        query = torch.randn(self.batch, self.heads, self.queries, self.dim)
        key = torch.randn(self.batch, kv_heads, self.length, self.dim)
        value = torch.randn(self.batch, kv_heads, self.length, value_dim)
        weights = torch.randn(self.batch, self.heads, self.queries, value_dim)
        lse_weights = torch.randn(self.batch, self.heads, self.queries)
        return [x.to(dtype) for x in (query, key, value, weights, lse_weights)]

    def masks(self) -> dict[str, Tensor | None]:
        torch.manual_seed(self.seed + 1)
        return {
            "document_ids": DOCUMENTS[self.documents](self.batch, self.length) if self.documents else None,
            "key_mask": MASKS[self.mask](self.batch, self.length) if self.mask else None,
        }

    def options(self) -> dict:
        """Keyword arguments of `attention`."""
        own = {"causal": self.causal, "window": self.window, "query_offset": self.offset, "scale": self.scale}
        return own | self.masks()

    def logits(self) -> scaleinv.LogitTransform:
        torch.manual_seed(self.seed + 2)
        offset = self.length - self.queries if self.offset is None else self.offset
        return TRANSFORMS[self.transform](self.heads, self.length + self.queries + abs(offset))


@st.composite
def cases(draw):
    """Any call: sizes, groups, offsets, masks and transform together."""
    queries, keys = draw(st.integers(1, 130)), draw(st.integers(1, 320))
    documents = draw(st.sampled_from([None, None, *DOCUMENTS]))
    offset = draw(st.none() | st.integers(-40, keys + 40))
    if documents:
        queries = min(queries, keys)
        offset = draw(st.none() | st.integers(0, keys - queries))
    kv_heads, groups = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (3, 2)]))
    return Case(
        queries,
        keys,
        dim=draw(st.sampled_from([1, 3, 8, 16, 33])),
        value_dim=draw(st.sampled_from([1, 7, 16, 40])),
        batch=draw(st.integers(1, 3)),
        heads=kv_heads * groups,
        kv_heads=kv_heads,
        transform=draw(st.sampled_from(list(TRANSFORMS))),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, 150)),
        offset=offset,
        documents=documents,
        mask=draw(st.sampled_from([None, *MASKS])),
        scale=draw(st.sampled_from([None, 0.3, -1.0])),
        seed=draw(st.integers(0, 1000)),
    )


def diagonal_call(case: Case, dtype: torch.dtype = torch.float32, **changes: Tensor) -> DiagonalCall:
    """The case as the engines of `scaleinv.ops.operator` take it."""
    given = dict(zip(("query", "key", "value"), case.tensors(dtype)[:3], strict=True)) | changes
    return checked(**given, logits=case.logits(), return_lse=True, **case.options()).on_diagonals()


def run(case: Case, backend: str, compute: torch.dtype, given: torch.dtype | None = None) -> dict[str, Tensor]:
    """Output, logsumexp and every gradient of a loss that uses both, from inputs rounded to `given`."""
    query, key, value, weights, lse_weights = (x.to(compute) for x in case.tensors(given or compute))
    leaves = {"query": query, "key": key, "value": value}
    for x in leaves.values():
        x.requires_grad_()
    logits = case.logits().to(torch.promote_types(compute, torch.float32))
    if backend == "rounded":
        out, lse = rounded.run(checked(query, key, value, logits, return_lse=True, **case.options()))
    else:
        out, lse = scaleinv.attention(query, key, value, logits, backend=backend, return_lse=True, **case.options())
    seen = lse.masked_fill(lse == -torch.inf, 0)
    ((out * weights).sum() + (seen * lse_weights).sum()).backward()
    grads = {f"grad {name}": x.grad for name, x in (leaves | dict(logits.named_parameters())).items()}
    return {"output": out.detach(), "logsumexp": lse.detach()} | grads


def check(case: Case, backend: str, dtype: torch.dtype, compute: Callable[..., dict[str, Tensor]] = run) -> None:
    """The backend is as accurate as the reference. ``compute`` is how to call it.

    Tensor cores multiply what is rounded to the inputs' 16 bits, weights included: there the reference rounds it too.
    """
    twin = "rounded" if backend == "triton" and dtype != torch.float32 else "reference"

    def pair(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        drawn = dataclasses.replace(case, seed=seed)
        return run(drawn, twin, dtype), run(drawn, "reference", torch.float64, given=dtype)

    others = (pair(case.seed + 1 + n) for n in range(7))
    assert_as_accurate(compute(case, backend, dtype), *pair(case.seed), others)


def assert_equal_to_rounding(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    """float64 against float64: only the order of the sums differs."""
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert value.shape == want[name].shape, name
        assert value.dtype == want[name].dtype, name
        gap, size = _gap(value, want[name])
        assert gap <= tolerance * (1 + size), f"{name}: off by {gap:.3g} of {size:.3g}"


def assert_as_accurate(
    got: dict[str, Tensor],
    same_precision: dict[str, Tensor],
    exact: dict[str, Tensor],
    others: Iterable[tuple[dict[str, Tensor], dict[str, Tensor]]] = (),
) -> None:
    """The error of `got` is at most 3 × the reference's in the same precision, plus a few roundings in float32.

    The reference's error is itself a draw: where few numbers are compared, or large terms cancel, it can be tiny by
    luck. A result beyond its bound is judged again by the largest error of `others` too: the same call with other
    inputs, in the same precision and exactly. They are computed only then.
    """
    assert {name: x.dtype for name, x in got.items()} == {name: x.dtype for name, x in same_precision.items()}
    allowed = _errors(same_precision, exact)
    if _excess(got, exact, allowed):
        for pair in others:
            allowed = {name: max(allowed[name], error) for name, error in _errors(*pair).items()}
    assert not _excess(got, exact, allowed)


def _errors(got: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {name: _gap(value, exact[name])[0] for name, value in got.items()}


def _excess(got: dict[str, Tensor], exact: dict[str, Tensor], allowed: dict[str, float]) -> list[str]:
    """Which results are off by too much, in words.

    A parameter's gradient is a sum over all rows, in which large terms may cancel (exactly so in the reference, where a
    row sees one key): the roundings of n terms add up to √n of one.
    """
    rows = got["logsumexp"].numel()
    single = ("output", "logsumexp", "grad query", "grad key", "grad value")
    assert got.keys() == exact.keys()
    found = []
    for name, value in got.items():
        assert value.shape == exact[name].shape, name
        error, size = _gap(value, exact[name])
        floor = 16 * torch.finfo(torch.float32).eps * (1 + size) * (1 if name in single else max(rows, 1) ** 0.5)
        if error > 3 * allowed[name] + floor:
            found.append(f"{name}: off by {error:.3g} of {size:.3g}, reference {allowed[name]:.3g}")
    return found


def _gap(got: Tensor, want: Tensor) -> tuple[float, float]:
    got, want = got.double(), want.double()
    finite = want.isfinite()
    assert torch.equal(got[~finite], want[~finite]), "infinities differ"
    assert got.isfinite()[finite].all(), "not finite where the exact value is"
    if not finite.any():
        return 0.0, 0.0
    return (got - want)[finite].abs().max().item(), want[finite].abs().max().item()


def tensors(batch=2, heads=4, kv_heads=2, queries=70, keys=70, dim=16, value_dim=12):
    """Query, key and value, always the same."""
    torch.manual_seed(0)
    query = torch.randn(batch, heads, queries, dim)
    return query, torch.randn(batch, kv_heads, keys, dim), torch.randn(batch, kv_heads, keys, value_dim)


def transform_of(name, heads=4):
    """One of `TRANSFORMS`, always the same."""
    torch.manual_seed(1)
    return TRANSFORMS[name](heads, 200)


def close(got, want):
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def gradients(tensors, backend, **options):
    """Output, logsumexp and the three gradients of a loss on both."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = scaleinv.attention(*leaves, backend=backend, return_lse=True, **options)
    (out.square().sum() + lse.masked_fill(lse == -torch.inf, 0).sum()).backward()
    return out.detach(), lse.detach(), *(x.grad for x in leaves)
