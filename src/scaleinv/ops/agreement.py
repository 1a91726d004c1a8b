"""Is a backend right on this machine? Small calls against the reference, gradients included; answers are remembered."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scaleinv import files
from scaleinv.logits import LogitTransform, ScaleInvariant
from scaleinv.machine import cache_folder
from scaleinv.ops import reference
from scaleinv.ops.call import Call, checked
from scaleinv.ops.precision import no_autocast

logger = logging.getLogger(__name__)

DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))


@dataclasses.dataclass(frozen=True)
class Sample:
    """A small call: one sequence, two query heads on one key head."""

    name: str
    queries: int
    keys: int
    window: int | None = None
    packed: bool = False
    learnable: bool = False

    def call(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[Call, list[Tensor]]:
        """The call and the leaves that get gradients; its inputs are rounded to float16 first in every dtype."""
        random = torch.Generator("cpu").manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, device="cpu").half().to(device, dtype).requires_grad_()

        query, key, value = (
            normal(1, 2, self.queries, head_dim),
            normal(1, 1, self.keys, head_dim),
            normal(1, 1, self.keys, head_dim),
        )
        logits: LogitTransform = ScaleInvariant(heads=2, learnable=self.learnable).to(device)
        positions = torch.arange(self.keys, device=device)[None]
        call = checked(
            query,
            key,
            value,
            logits,
            causal=True,
            window=self.window,
            document_ids=positions // 90 if self.packed else None,
            key_mask=positions % 7 > 0 if self.packed else None,
            query_offset=None,
            scale=None,
            return_lse=True,
        )
        return call, [query, key, value, *logits.parameters()]


def plain_call(query: Tensor, key: Tensor, value: Tensor) -> Call:
    """Causal scale-invariant attention, and nothing else."""
    defaults = dict.fromkeys(("window", "document_ids", "key_mask", "query_offset", "scale"))
    return checked(query, key, value, None, causal=True, return_lse=False, **defaults)


SAMPLES = (
    Sample("self-attention", 150, 150),
    Sample("packed documents, a window and learned lengthscales", 131, 203, window=77, packed=True, learnable=True),
    Sample("decoding", 3, 700),
)


def doubt(module: Any, call: Call) -> str | None:
    """Why not to trust a backend with such calls; None if it agrees with the reference. Warns once if it does not."""
    return _doubt(module.__name__, call.device, call.query.dtype, max(call.query.shape[3], call.value.shape[3]))


@torch.compiler.assume_constant_result
def _doubt(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return f"{name} cannot be checked while a CUDA graph is captured"
    return _remembered(name, device, dtype, head_dim)


@functools.cache
def _remembered(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    module = sys.modules[name]
    identity = {"backend": name, **machine(module, device), "dtype": str(dtype), "head dim": head_dim}
    try:
        found = _read_or_find(identity, lambda: differs(module, device, dtype, head_dim))
    except torch.OutOfMemoryError as error:  # true of this process alone: not remembered
        found = f"{name} could not be checked: {_first_line(error)}"
        warnings.warn(f"{found}; another backend is used", stacklevel=2)
        return found
    if found is not None:
        warnings.warn(f"{name} is wrong on this machine, another backend is used: {found}", stacklevel=2)
    return found


def _read_or_find(identity: dict, find: Callable[[], str | None]) -> str | None:
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]
    with contextlib.suppress(OSError, RuntimeError, files.UnreadableFile):  # RuntimeError: the user has no home
        known = files.read_object(cache_folder() / "agreement" / f"{digest}.json")
        answer = known.pop("differs", 0)
        if known == identity and (answer is None or isinstance(answer, str)):  # else the file is damaged
            return answer
    logger.info("checking %s on this machine (once, about a minute)", identity["backend"])
    found = find()
    with contextlib.suppress(OSError, RuntimeError):
        files.write_json(cache_folder() / "agreement" / f"{digest}.json", identity | {"differs": found})
    return found


def machine(module: Any, device: torch.device) -> dict[str, str]:
    """What an answer depends on: GPU, driver, torch, triton and the backend's source."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    drivers = [path for path in DRIVERS if path.exists()]
    return {
        "gpu": gpu,
        "driver": drivers[0].read_text().partition("\n")[0] if drivers else "none",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda or torch.version.hip),
        "triton": metadata.version("triton") if importlib.util.find_spec("triton") else "none",
        "source": _source(module),
    }


def _source(module: Any) -> str:
    """A digest of the files in a backend's folder."""
    digest = hashlib.sha256()
    for file in sorted(Path(module.__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def differs(module: Any, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """What differs from the reference in the samples, in words; None if nothing does."""
    with torch.inference_mode(False), torch.enable_grad(), no_autocast(device), device:
        for sample in SAMPLES:
            try:
                found = _first_difference(module, sample, device, dtype, head_dim)
            except torch.OutOfMemoryError:  # says nothing of the backend
                raise
            except Exception as error:  # a compiler or a driver that fails is an answer too
                found = f"{type(error).__name__}: {_first_line(error)}"
            if found is not None:
                return f"{sample.name}, {dtype}, head dim {head_dim}: {found}"
    return None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _first_difference(
    module: Any, sample: Sample, device: torch.device, dtype: torch.dtype, head_dim: int
) -> str | None:
    for found in comparison(module, sample, device, dtype, head_dim):
        if not found.error <= found.limit:  # NaN is not
            return f"{found.name} off by {found.error:.2g}, {found.limit:.2g} allowed"
    return None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How far one result of a backend is from the exact one."""

    name: str
    error: float
    same_precision: float  # the error of the reference in the backend's precision
    limit: float


def comparison(
    module: Any, sample: Sample, device: torch.device, dtype: torch.dtype, head_dim: int
) -> Iterator[Comparison]:
    """Output, logsumexp and gradients of a sample, each against the reference in float64."""
    got = results(module, *sample.call(device, dtype, head_dim))
    same = results(reference, *sample.call(device, dtype, head_dim))
    exact = results(reference, *sample.call(device, torch.float64, head_dim))
    for name, want in exact.items():
        yield Comparison(name, *errors(got[name], same[name], want, dtype))


def results(module: Any, call: Call, leaves: list[Tensor]) -> dict[str, Tensor]:
    """Output, logsumexp and gradients of a call on a backend's module."""
    out, lse = module.run(call)
    loss = out.to(lse.dtype).square().sum() + lse.masked_fill(lse == -torch.inf, 0).sum()
    grads = torch.autograd.grad(loss, leaves)
    names = ("query", "key", "value", "lengthscale")
    return {"output": out, "logsumexp": lse, **{f"gradient of {n}": g for n, g in zip(names, grads, strict=False)}}


def errors(got: Tensor, same: Tensor, exact: Tensor, dtype: torch.dtype) -> tuple[float, float, float]:
    """The largest error, that of the reference in the same precision, and the limit: a few times the latter.

    In half precision the tensor cores round the weights too: a rounding of the largest value is allowed for them.
    """
    exact = exact.double()
    finite = exact.isfinite()
    error, own = ((x.double() - exact)[finite].abs().max().item() for x in (got, same))
    if not torch.equal(got.double()[~finite], exact[~finite]):
        error = float("inf")
    size = 1 + exact[finite].abs().max().item()
    half = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
    return error, own, 4 * own + size * (half + 32 * torch.finfo(torch.float32).eps)
