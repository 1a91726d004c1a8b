"""`CertifiedCache`: keys and values that a decoding step reads in part, with a proven bound on what it leaves out."""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import Tensor

from scaleinv.logits import LogitTransform, ScaleInvariant
from scaleinv.ops.certified import native, reference
from scaleinv.ops.certified.pages import BLOCK, PAGE, Page, empty_page, fill
from scaleinv.ops.masks import FAR, Geometry, visible_counts

BACKENDS = ("auto", "native", "torch")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ROW_BYTES = 1 << 28
"""Upper weights that a step holds at once, in bytes; a longer chunk of queries is taken in parts."""
LARGEST = 1e60
"""Products of a scale, a query, a key and its gain stay finite in float64 if none is larger."""


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What is known for certain of an output, for each query and head: float64 ``[B, H, Nq]`` each."""

    mass: Tensor
    """At most this share of the exact softmax weight lies on keys that were not read."""
    error: Tensor
    """The output differs from exact attention by at most this in the Euclidean norm, rounding included."""
    read: Tensor
    """The share of the visible keys that were read in full; 1 where nothing could be saved."""


class CertifiedCache:
    """A cache for decoding that reads only the keys which matter, and proves how little the others do.

    >>> cache = CertifiedCache(ScaleInvariant(), tolerance=1e-3)
    >>> cache.append(torch.randn(1, 2, 5000, 64), torch.randn(1, 2, 5000, 64))
    >>> out, certificate = cache.attend(torch.randn(1, 2, 1, 64))
    >>> out.shape, bool((certificate.mass <= 1e-3).all())
    (torch.Size([1, 2, 1, 64]), True)

    Args:
        logits: the logit transform, fixed for the life of the cache; None for ``ScaleInvariant()``.
        tolerance: the share of the softmax weight that may be left unread, from 0 (read everything) to below 1.
        window: only keys at distances t < window.
        scale: multiplies ``q·k``; None for ``1/√D``.
        backend: "native" (the C kernel: float32 on CPU), "torch" (its plain twin, on any device, for checking: it
            computes in float64) or "auto": the kernel where it can serve.
    """

    def __init__(
        self,
        logits: LogitTransform | None = None,
        tolerance: float = 1e-3,
        *,
        window: int | None = None,
        scale: float | None = None,
        backend: str = "auto",
    ) -> None:
        if logits is not None and not isinstance(logits, LogitTransform):
            raise TypeError(f"logits must be a scaleinv logit transform, got {type(logits).__name__}")
        if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 <= tolerance < 1:
            raise ValueError(f"tolerance must lie in [0, 1), got {tolerance!r}")
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise ValueError(f"window must be a positive integer or None, got {window!r}")
        numeric = isinstance(scale, (int, float)) and not isinstance(scale, bool)
        if scale is not None and not (numeric and abs(scale) <= LARGEST):
            raise ValueError(f"scale must be a finite number up to {LARGEST:g} in size or None, got {scale!r}")
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        self.logits = ScaleInvariant() if logits is None else logits
        self.tolerance = float(tolerance)
        self.window = window
        self.scale = scale
        self.backend = backend
        self.length = 0
        """Keys held."""
        self.pages: list[Page] = []
        self._addresses = native.PageList()
        self._tables: tuple[Tensor, Tensor] | None = None
        self._tables_of: LogitTransform | None = None
        self._holes = False
        self._wait: Tensor | None = None
        self._form: tuple | None = None
        self._native = self._plain = False

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add keys ``[B, KV, n, D]`` and values ``[B, KV, n, Dv]`` behind those held.

        bfloat16 and float16 are kept as float32, which holds them exactly. Nothing that is held moves: a full page
        is followed by another.
        """
        form = _form(key, value)
        if form is None or form != self._form:  # token after token has the same
            self._check_append(key, value)
            self._native = self._uses_kernel(key)
            self._plain = key.dtype in (torch.float32, torch.float64) and key.stride(3) == value.stride(3) == 1
            if self._native and self._plain:
                self._addresses.expect(key, value)
            self._form = form
        if not self._plain:
            dtype = torch.promote_types(key.dtype, torch.float32)
            key, value = (x.detach().to(dtype).contiguous() for x in (key, value))
            if self._native:
                self._addresses.expect(key, value)
        held, start, stop = len(self.pages), self.length, self.length + key.shape[2]
        if start == stop:
            return
        while len(self.pages) * PAGE < stop:
            self.pages.append(empty_page(key, value))
            self._addresses.add(self.pages[-1])
        if not (self._append_kernel if self._native else self._append_torch)(start, key, value):
            del self.pages[held:]
            self._addresses.count = held
            raise ValueError(f"key and value must be finite{_limit(key)}: no bound holds for others")
        self.length = stop

    def _append_kernel(self, start: int, key: Tensor, value: Tensor) -> bool:
        pages = self._addresses
        return pages.append(pages.where, start, key.data_ptr(), value.data_ptr()) == 0

    def _append_torch(self, start: int, key: Tensor, value: Tensor) -> bool:
        key, value, stop = key.detach(), value.detach(), start + key.shape[2]
        if not (_is_usable(key) and _is_usable(value)):
            return False
        for n in range(start // PAGE, -(-stop // PAGE)):
            low, high = max(start, n * PAGE), min(stop, (n + 1) * PAGE)
            part = slice(low - start, high - start)
            fill(self.pages[n], low - n * PAGE, key[:, :, part], value[:, :, part])
        return True

    @torch.no_grad()
    def attend(self, query: Tensor, *, key_mask: Tensor | None = None) -> tuple[Tensor, Certificate]:
        """Attention of queries ``[B, H, Nq, D]`` at the last Nq positions: output ``[B, H, Nq, Dv]`` and certificate.

        The output carries no gradient.

        Args:
            query: KV divides H, and query head h reads key head ``h // (H / KV)``.
            key_mask: bool ``[B, length]``, True for visible keys.
        """
        self._check_attend(query, key_mask)
        geometry = Geometry.of(query.shape[2], self.length, self.length - query.shape[2], True, self.window)
        query_gain = self._query_gain(geometry, key_mask, query)
        size = max(1, ROW_BYTES // (4 * query.shape[0] * query.shape[1] * max(self.length, 1)))
        parts = []
        for start in range(0, query.shape[2], size):
            stop = min(start + size, query.shape[2])
            c = query_gain[..., start:stop] if query_gain is not None else None
            keys = self.length - query.shape[2] + stop
            parts.append(self._attend(query[:, :, start:stop], c, key_mask, keys))
        out, *certificate = (torch.cat(x, dim=2) if len(x) > 1 else x[0] for x in zip(*parts, strict=True))
        mass, error, read = certificate
        rounded = out.to(query.dtype)
        if rounded.dtype != out.dtype:
            error = error + (rounded.double() - out.double()).norm(dim=-1)
        return rounded, Certificate(mass, error, read)

    def __copy__(self) -> CertifiedCache:
        return copy.deepcopy(self)  # two caches with the same pages would write over each other's tokens

    def __getstate__(self) -> dict:
        return {name: held for name, held in vars(self).items() if name != "_addresses"} | {"_form": None}

    def __setstate__(self, state: dict) -> None:
        """A copy has its pages elsewhere in memory."""
        vars(self).update(state, _addresses=native.PageList())
        for page in self.pages:
            self._addresses.add(page)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages: keys, values, the copy and what goes with it."""
        return sum(x.nbytes for page in self.pages for x in vars(page).values())

    def tensors(self) -> tuple[Tensor, Tensor]:
        """All keys ``[B, KV, length, D]`` and values, copied out of the pages."""
        if not self.length:
            raise ValueError("the cache is empty: append keys first")
        key = torch.cat([page.key for page in self.pages], dim=2)[:, :, : self.length]
        value = torch.cat([page.value for page in self.pages], dim=2)[:, :, : self.length]
        return key, value

    def _attend(self, query: Tensor, c: Tensor | None, key_mask: Tensor | None, keys: int) -> tuple[Tensor, ...]:
        first = self.pages[0]
        query = query.to(first.key.dtype)
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        window = FAR if self.window is None else min(self.window, FAR)
        if not self._native:
            a, m = self._float64_tables(keys, query.device)
            mask = key_mask[:, :keys] if key_mask is not None else None
            return reference.attend(self.pages, keys, query, c, a, m, mask, window, scale, self.tolerance)
        if self._wait is None or self._wait.shape[1] != query.shape[1]:
            self._wait = torch.zeros(query.shape[0], query.shape[1], 2, dtype=torch.int32)
        tables = self._reversed_tables(keys)
        mask = key_mask[:, :keys] if key_mask is not None else None
        length = tables[0].shape[1] - BLOCK
        return native.attend(
            self._addresses,
            keys,
            first.key.shape[1],
            query,
            c,
            tables,
            length,
            self._holes,
            mask,
            window,
            scale,
            self.tolerance,
            self._wait,
            first.value.shape[3],
        )

    def _reversed_tables(self, keys: int) -> tuple[Tensor, Tensor]:
        """a and m for distances T - 1 … 0, with `BLOCK` more entries that no visible key reaches: T >= keys."""
        if self._tables is None or self._tables_of is not self.logits or self._tables[0].shape[1] - BLOCK < keys:
            length = 1 << max(10, (keys - 1).bit_length())
            try:
                a, m = self._float64_tables(length, torch.device("cpu"))
            except ValueError:  # a table of fixed length
                a, m = self._float64_tables(keys, torch.device("cpu"))
            a, m = torch.broadcast_tensors(a, m)
            self._tables_of, self._holes = self.logits, bool((m == -torch.inf).any())
            pad = torch.nn.functional.pad
            self._tables = pad(a.flip(1).float(), (0, BLOCK)), pad(m.flip(1).float(), (0, BLOCK))
        return self._tables

    def _float64_tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        a, m = self.logits.tables(length, dtype=torch.float64, device=device)
        most = torch.finfo(torch.float32).max
        if not bool((a.abs() <= most).all() & ((m.abs() <= most) | (m == -torch.inf)).all()):
            raise ValueError(
                f"logits ({type(self.logits).__name__}) must give gains in float32's range, and shifts in it or -inf"
            )
        return a, m

    def _query_gain(self, geometry: Geometry, key_mask: Tensor | None, query: Tensor) -> Tensor | None:
        c = self.logits.gain_of_queries(
            lambda: visible_counts(geometry, None, key_mask, query.device), context=self.length
        )
        if c is not None and not _is_usable(c):
            raise ValueError(f"logits ({type(self.logits).__name__}) must give finite factors of queries{_limit(c)}")
        return None if c is None else c.double().expand(query.shape[0], -1, -1)

    def _uses_kernel(self, key: Tensor) -> bool:
        if self.backend == "torch":
            return False
        obstacle = native.obstacle(key.device, torch.promote_types(key.dtype, torch.float32), key.shape[3])
        if obstacle is not None and self.backend == "native":
            raise ValueError(f"backend='native' cannot serve this cache: {obstacle}")
        return obstacle is None

    def _check_append(self, key: Tensor, value: Tensor) -> None:
        for name, x in (("key", key), ("value", value)):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
            if x.dim() != 4 or 0 in (*x.shape[:2], x.shape[3]):
                raise ValueError(f"{name} must have shape [batch, heads, length, head dim], got {tuple(x.shape)}")
            if x.dtype not in DTYPES:
                raise TypeError(f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}")
            if x.layout != torch.strided or x.device.type == "meta":
                raise ValueError(f"{name} must be a dense tensor with memory of its own, got {x.layout} on {x.device}")
        if value.shape[:3] != key.shape[:3] or value.dtype != key.dtype or value.device != key.device:
            raise ValueError(
                "value must have key's batch, heads, length, dtype and device, "
                f"got {tuple(value.shape)} {value.dtype} on {value.device} "
                f"beside {tuple(key.shape)} {key.dtype} on {key.device}"
            )
        if self.pages:
            held = self.pages[0]
            wanted = (*held.key.shape[:2], held.key.shape[3], held.value.shape[3])
            if (*key.shape[:2], key.shape[3], value.shape[3]) != wanted:
                raise ValueError(
                    "key and value must have the batch, heads and head dimensions of those held "
                    f"{list(wanted)}, got {list(key.shape)} and {list(value.shape)}"
                )
            if torch.promote_types(key.dtype, torch.float32) != held.key.dtype or key.device != held.key.device:
                raise ValueError(f"key must be {held.key.dtype} on {held.key.device}, got {key.dtype} on {key.device}")

    def _check_attend(self, query: Tensor, key_mask: Tensor | None) -> None:
        if not isinstance(query, Tensor):
            raise TypeError(f"query must be a tensor, got {type(query).__name__}")
        if not self.length:
            raise ValueError("the cache is empty: append keys first")
        held = self.pages[0].key
        if query.layout != torch.strided:
            raise ValueError(f"query must be a dense tensor, got {query.layout}")
        if query.dim() != 4 or query.shape[0] != held.shape[0] or query.shape[3] != held.shape[3]:
            raise ValueError(
                f"query must have shape [{held.shape[0]}, heads, length, {held.shape[3]}], got {list(query.shape)}"
            )
        if query.shape[1] == 0 or query.shape[1] % held.shape[1]:
            raise ValueError(f"query must have a multiple of {held.shape[1]} heads, got {query.shape[1]}")
        if not 1 <= query.shape[2] <= self.length:
            raise ValueError(
                f"query must have 1 … {self.length} positions, the last of those held, got {query.shape[2]}"
            )
        if self.logits.heads is not None and self.logits.heads != query.shape[1]:
            raise ValueError(f"logits is made for {self.logits.heads} heads, but query has {query.shape[1]}")
        fits = query.dtype in DTYPES and torch.promote_types(query.dtype, torch.float32) == held.dtype
        if not fits or query.device != held.device:
            raise ValueError(
                f"query must be like the keys, {held.dtype} on {held.device}, got {query.dtype} on {query.device}"
            )
        if not _is_usable(query):
            raise ValueError(f"query must be finite{_limit(query)}: no bound holds for others")
        if key_mask is not None:
            shape = (held.shape[0], self.length)
            if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool or tuple(key_mask.shape) != shape:
                raise ValueError(f"key_mask must be a bool tensor of shape {list(shape)}, True for visible keys")
            if key_mask.device != held.device:
                raise ValueError(f"key_mask must be on {held.device} like the keys, got {key_mask.device}")


def _form(key: Tensor, value: Tensor) -> tuple | None:
    """All that `append` checks but the numbers; None for what is not a tensor."""
    if not isinstance(key, Tensor) or not isinstance(value, Tensor):
        return None
    strides = key.stride(), value.stride()
    return key.shape, value.shape, strides, key.dtype, value.dtype, key.device, value.device


def _is_usable(x: Tensor) -> bool:
    return bool((x.abs() <= min(LARGEST, torch.finfo(x.dtype).max)).all())


def _limit(x: Tensor) -> str:
    return f" and at most {LARGEST:g} in size" if x.dtype == torch.float64 else ""
