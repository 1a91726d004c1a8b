"""Checkpoints that survive anything: whole or not there at all, checked when read, and free of pickle.

A checkpoint is a folder ``step-000100`` of safetensors files written by torch.distributed.checkpoint, with a
``manifest.json`` that holds the step and every file's size and hash. It is written under another name and renamed when
complete, so a killed run leaves the last whole one. A checkpoint saved on several ranks loads on any number.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
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

from scaleinv.files import read_object, write_json

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
PREFIX = "step-"
PARTIAL = ".partial-"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


def save(folder: Path, step: int, tensors: dict[str, Tensor], extra: dict[str, Any], keep: int) -> Path:
    """Write ``folder/step-XXXXXX`` and delete all but the newest ``keep`` whole ones. All ranks call it together."""
    final, partial = folder / f"{PREFIX}{step:06d}", folder / f"{PARTIAL}{step:06d}"
    first = _rank() == 0
    for stage in (
        lambda: _begin(partial) if first else None,
        lambda: _write(partial, tensors),
        lambda: _finish(partial, final, {"step": step, "extra": extra}, keep) if first else None,
    ):
        problem = None
        try:
            stage()
        except (Exception, dcp.CheckpointException) as error:  # the latter is a BaseException
            problem = error
        if _any(problem is not None):
            if first:
                shutil.rmtree(partial, ignore_errors=True)
            reason = "another rank failed" if problem is None else _reason(problem)
            raise CheckpointError(f"checkpoint of step {step} could not be written to {folder}: {reason}") from problem
    return final


def _begin(partial: Path) -> None:
    remove_partial(partial.parent)
    partial.mkdir(parents=True)


def _write(partial: Path, tensors: dict[str, Tensor]) -> None:
    many = dist.is_initialized()
    with _quiet():
        writer = dcp.HuggingFaceStorageWriter(str(partial), save_distributed=many)
        dcp.save(tensors, storage_writer=writer, no_dist=not many)


def _finish(partial: Path, final: Path, manifest: dict[str, Any], keep: int) -> None:
    write_json(partial / MANIFEST, {**manifest, "files": _digests(partial)})
    for path in (*partial.iterdir(), partial):
        _sync(path)
    if final.exists():
        os.replace(final, partial.with_name(f"{partial.name}-before"))
    os.replace(partial, final)
    _sync(final.parent)
    _verified(final)
    remove_partial(final.parent)
    delete_old(final.parent, keep)


def delete_old(folder: Path, keep: int) -> None:
    """Delete checkpoints older than the newest ``keep`` whole ones, and the damaged ones among these.

    Nothing is deleted until that many have been found whole. If a run is killed here, what it has half deleted is no
    checkpoint any more: `remove_partial` deletes the rest.
    """
    if len(_found(folder)) <= keep:
        return
    whole: list[Path] = []
    others: list[Path] = []
    for path in _found(folder):
        (whole if len(whole) < keep and _is_whole(path) else others).append(path)
    if len(whole) == keep:
        for path in others:
            doomed = path.with_name(f"{PARTIAL}{path.name}")
            os.replace(path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _is_whole(path: Path) -> bool:
    try:
        _verified(path)
        return True
    except CheckpointError as error:
        logger.warning("%s", error)
        return False


def newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint and its manifest; damaged ones are reported and skipped."""
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
        known = ", ".join(str(_step(found)) for found in reversed(_found(folder))) or "none"
        raise ValueError(f"step {step} has no checkpoint in {folder}: there are {known}")
    _verified(path)
    return path


def load(path: Path, tensors: dict[str, Tensor]) -> None:
    """Read a checkpoint into the given tensors, in place. All ranks call it together."""
    try:
        with _quiet():
            dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=not dist.is_initialized())
    except (Exception, dcp.CheckpointException) as error:
        raise CheckpointError(f"checkpoint {path} does not fit this run: {_reason(error)}") from error


def remove_partial(folder: Path) -> None:
    """Delete what a killed run left half written."""
    for path in folder.glob(f"{PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


def _found(folder: Path) -> list[Path]:
    """Checkpoints, newest first."""
    paths = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return sorted(paths, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


def _verified(path: Path) -> dict[str, Any]:
    """The manifest of a whole checkpoint; CheckpointError for a damaged one."""
    try:
        manifest = read_object(path / MANIFEST)
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {error}") from error
    for name, kind in (("step", int), ("extra", dict), ("files", dict)):
        if not isinstance(manifest.get(name), kind):
            raise CheckpointError(f"checkpoint {path} is damaged: {MANIFEST} has no valid {name!r}")
    if manifest["step"] != _step(path):
        raise CheckpointError(f"checkpoint {path} is damaged: {MANIFEST} is of step {manifest['step']}")
    actual, expected = _digests(path), manifest["files"]
    for name in expected:
        if actual.get(name) != expected[name]:
            state = "is missing" if name not in actual else "was changed or cut short"
            raise CheckpointError(f"checkpoint {path} is damaged: {name} {state}")
    if not expected:
        raise CheckpointError(f"checkpoint {path} is damaged: {MANIFEST} names no files")
    return manifest


def _digests(path: Path) -> dict[str, dict[str, Any]]:
    """Sizes and hashes of a checkpoint's files."""
    result = {}
    for file in sorted(path.iterdir()):
        if file.name == MANIFEST or not file.is_file():
            continue
        stat = file.stat()
        digest = _digest(file, stat.st_ino, stat.st_mtime_ns, stat.st_size)
        result[file.name] = {"bytes": stat.st_size, "blake2b": digest}
    return result


@functools.lru_cache(maxsize=1024)
def _digest(path: Path, inode: int, changed: int, size: int) -> str:
    """A file's hash, computed once per state of the file, so that kept checkpoints are not read at every save."""
    digest = hashlib.blake2b()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file's or folder's content is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _any(flag: bool) -> bool:
    """Whether it is true on any rank. All of them wait for the answer."""
    if not dist.is_initialized():
        return flag
    flags: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return any(flags)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch.distributed.checkpoint's warnings about what is intended: one process, no consolidated copy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _reason(error: BaseException) -> str:
    """The first cause, in one line."""
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
