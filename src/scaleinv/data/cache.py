"""Text tokenised once: a folder of shards for each text and tokenizer, checked whenever it is used.

A damaged folder (a shard, meta.json or the tokenizer is missing, cut short or edited) is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from scaleinv.data.documents import fingerprint
from scaleinv.data.prepare import META, prepare
from scaleinv.data.shards import scan_shard
from scaleinv.data.tokenizers import identity
from scaleinv.files import UnreadableFile, read_object

logger = logging.getLogger(__name__)

_FORMAT = 2  # of the cache; raise it when prepare writes something else


class Prepared(NamedTuple):
    """A folder that `prepare` wrote."""

    folder: Path
    shards: list[Path]
    cut: bool
    """One document, cut in two for validation."""


def prepared(text: str, tokenizer: str, val_fraction: float, cache: Path) -> Prepared:
    """The shards of a text in a folder of ``cache``, made if they are missing or damaged."""
    key = json.dumps([_FORMAT, fingerprint(text), identity(tokenizer), val_fraction])
    folder = cache / hashlib.sha256(key.encode()).hexdigest()[:32]
    if folder.exists():
        try:
            return _checked(folder, cache)
        except UnreadableFile as error:
            logger.warning("%s is damaged or missing: tokenising %s again", error.path, text)
    with temporary_folder(cache) as made:
        prepare(text, tokenizer, made, workers=1, val_fraction=val_fraction)
        with contextlib.suppress(UnreadableFile):  # unless another process was first and made the same
            return _checked(folder, cache)
        replace_folder(folder, made)
    return _checked(folder, cache)


def _checked(folder: Path, cache: Path) -> Prepared:
    """What a folder holds; UnreadableFile if it is not what `prepare` wrote."""
    path = folder / META
    meta = read_object(path)
    hashes, cut = meta.get("sha256"), meta.get("cut")
    if not isinstance(hashes, dict) or not isinstance(cut, bool):
        raise UnreadableFile(path, "must hold an object 'sha256' and a true or false 'cut'")
    shards = [folder / name for name in sorted(hashes)]
    if shards != sorted(folder.glob("*.bin")):
        raise UnreadableFile(path, "does not name the shards that are there")
    for shard in shards:
        if scan_shard(shard, cache / "scans").sha256 != hashes[shard.name]:
            raise UnreadableFile(shard, "does not hold the tokens that were written")
    if identity(str(folder)) != meta.get("tokenizer_sha256"):
        raise UnreadableFile(folder, "does not hold the tokenizer that was written")
    return Prepared(folder, shards, cut)


@contextlib.contextmanager
def temporary_folder(cache: Path) -> Iterator[Path]:
    """A new folder in the cache that is deleted afterwards, unless it has been renamed."""
    folder = cache / f".making-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"cache {cache} must be a folder that can be written to ({error.strerror})") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replace_folder(folder: Path, made: Path) -> None:
    """Put a folder in the place of a damaged one, if there is one."""
    aside = made.with_name(f"{made.name}-damaged")
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, aside)
    try:
        os.rename(made, folder)
    except OSError:  # another process was first and made the same
        if not folder.is_dir():
            raise
    finally:
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)
