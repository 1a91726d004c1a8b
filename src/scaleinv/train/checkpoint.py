"""Checkpoints that survive anything: whole or not there at all, checked when read, and free of pickle.

A checkpoint is a folder ``step-000100`` of safetensors files written by torch.distributed.checkpoint, with a
``manifest.json`` that holds the step and every file's size and hash. It is written under another name and renamed when
complete, so a killed run leaves the last whole one. What was saved on several ranks loads on any number.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from scaleinv.files import write_text

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
PREFIX = "step-"
PARTIAL = ".partial-"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


def save(folder: Path, step: int, tensors: dict[str, Tensor], extra: dict[str, Any], keep: int) -> Path:
    """Write ``folder/step-XXXXXX`` and delete all but the newest ``keep``. All ranks call it together."""
    final, partial = folder / f"{PREFIX}{step:06d}", folder / f"{PARTIAL}{step:06d}"
    first, many = _rank() == 0, dist.is_initialized()
    problem = None
    try:
        if first:
            remove_partial(folder)
            partial.mkdir(parents=True)
        _barrier()
        with _quiet():
            writer = dcp.HuggingFaceStorageWriter(str(partial), save_distributed=many)
            dcp.save(tensors, storage_writer=writer, no_dist=not many)
        _barrier()
        if first:
            manifest = {"step": step, "extra": extra, "files": _digests(partial)}
            write_text(partial / MANIFEST, json.dumps(manifest, indent=1))
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)
            _sync(folder)
            for old in _found(folder)[keep:]:
                shutil.rmtree(old, ignore_errors=True)
    except Exception as error:  # torch wraps what the disk says in classes of its own
        problem = error
    if problem is not None:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint of step {step} could not be written to {folder}: {_reason(problem)}"
        ) from problem
    _barrier()
    return final


def newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint and its manifest; damaged ones are reported and passed over."""
    for path in _found(folder):
        try:
            return path, _verified(path)
        except CheckpointError as error:
            logger.warning("%s; trying the one before", error)
    return None


def of_step(folder: Path, step: int) -> Path:
    """The whole checkpoint of a step; ValueError names those there are."""
    path = folder / f"{PREFIX}{step:06d}"
    if not path.exists():
        known = ", ".join(found.name.removeprefix(PREFIX).lstrip("0") for found in reversed(_found(folder))) or "none"
        raise ValueError(f"step {step} has no checkpoint in {folder}: there are {known}")
    _verified(path)
    return path


def load(path: Path, tensors: dict[str, Tensor]) -> None:
    """Read a checkpoint into the given tensors, in place. All ranks call it together."""
    try:
        with _quiet():
            dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=not dist.is_initialized())
    except Exception as error:
        raise CheckpointError(f"checkpoint {path} does not fit this run: {_reason(error)}") from error


def remove_partial(folder: Path) -> None:
    """Delete what a killed run left half written."""
    for path in folder.glob(f"{PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


def _found(folder: Path) -> list[Path]:
    """Checkpoints, newest first."""
    paths = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return sorted(paths, key=lambda path: int(path.name.removeprefix(PREFIX)), reverse=True)


def _verified(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        expected = manifest["files"]
        manifest["step"], manifest["extra"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: its {MANIFEST} cannot be read ({error})") from error
    actual = _digests(path)
    for name in expected:
        if actual.get(name) != expected[name]:
            state = "is missing" if name not in actual else "was changed or cut short"
            raise CheckpointError(f"checkpoint {path} is damaged: {name} {state}")
    return manifest


def _digests(path: Path) -> dict[str, dict[str, Any]]:
    result = {}
    for file in sorted(path.iterdir()):
        if file.name == MANIFEST or not file.is_file():
            continue
        with file.open("rb") as stream:
            digest = hashlib.blake2b()
            while block := stream.read(1 << 20):
                digest.update(block)
        result[file.name] = {"bytes": file.stat().st_size, "blake2b": digest.hexdigest()}
    return result


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch.distributed.checkpoint warns of what is meant here: one process, and no consolidated copy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _reason(error: BaseException) -> str:
    """The first cause, in a line."""
    failures = getattr(error, "failures", None)
    if failures:
        inner = next(iter(failures.values()))
        error = inner[0] if isinstance(inner, tuple) else inner
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


def to_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole, contiguous CPU copies of (possibly sharded) tensors. All ranks call it together."""
    whole = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in tensors.items()}
    return {name: torch.empty_like(x, device="cpu").copy_(x).contiguous() for name, x in whole.items()}
