"""C sources compiled on demand and kept in a cache that only this user can write to.

Building takes a few seconds, once per machine: the library's name is made from the source, the compiler and the CPU.
It is loaded only if nobody else can write to its folder and file, and its hash is the one noted when it was built;
otherwise it is built again. If the cache cannot be used, a private folder in the system's temporary one replaces it.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from scaleinv import files
from scaleinv.machine import cache_folder

logger = logging.getLogger(__name__)
Library = TypeVar("Library")

FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")


def build(source: Path, load: Callable[[Path], Library], flags: tuple[str, ...] | None = None) -> Library | str:
    """What ``load`` returns for a C source's library, compiled unless it is in the cache; or why there is none.

    Warns if there is none. None for ``flags`` means `FLAGS`.
    """
    try:
        return load(_library(_compiler(), source, FLAGS if flags is None else flags))
    except _NoCompiler as error:
        reason = str(error)
    except (OSError, ValueError, subprocess.SubprocessError) as error:  # ValueError: output that is not text
        detail = isinstance(error, subprocess.CalledProcessError) and error.stderr.strip()
        reason = f"the C kernel could not be built: {detail or error}"
    logger.warning("%s; using slower Python code instead", reason)
    return reason


class _NoCompiler(Exception):
    pass


def _compiler() -> list[str]:
    """The command of the C compiler: CC, or the first of the usual ones."""
    wanted = os.environ.get("CC", "").strip()
    try:
        commands = [shlex.split(wanted)] if wanted else [["cc"], ["gcc"], ["clang"]]
    except ValueError as error:
        raise _NoCompiler(f"no C compiler found (CC={wanted} is not a command: {error})") from None
    found = next((command for command in commands if command and shutil.which(command[0])), None)
    if found is None:
        raise _NoCompiler(f"no C compiler found ({f'CC={wanted}' if wanted else 'cc, gcc or clang'})")
    return found


def _library(compiler: list[str], source: Path, flags: tuple[str, ...]) -> Path:
    """The library's path; compiles it unless the cache holds it undamaged."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    identity = "\n".join([source.read_text(encoding="utf-8"), version, platform.machine(), _cpu(), *flags])
    name = f"{source.parent.name}-{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    path = private_folder() / name
    if not _unharmed(path):
        logger.info("building %s with %s (once, a few seconds)", source.name, compiler[0])
        with files.replacing(path) as temporary:  # another process may build it at the same time: either result is good
            command = [*compiler, *flags, "-o", str(temporary), str(source), "-lm"]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
            temporary.chmod(0o700)
            digest = _hash(temporary)
        files.write_text(_note(path), digest)
        _note(path).chmod(0o600)
    return path


def _unharmed(path: Path) -> bool:
    """Whether a library and the note of its hash exist, are writable only by us, and agree."""
    try:
        ours = all(_ours_alone(x.lstat()) and stat.S_ISREG(x.lstat().st_mode) for x in (path, _note(path)))
        return ours and _note(path).read_bytes() == _hash(path).encode()
    except OSError:
        return False


def _note(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def private_folder() -> Path:
    """A folder that only this user can write to: in the cache, else in the system's temporary folder."""
    for folder in _candidates():
        try:
            for missing in [x for x in (folder, *folder.parents) if not x.exists()][::-1]:
                missing.mkdir(mode=0o700, exist_ok=True)  # whatever the umask
            if _is_private(folder) and os.access(folder, os.W_OK | os.X_OK):
                return folder
        except OSError:
            continue
    folder = Path(tempfile.mkdtemp(prefix="scaleinv-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _candidates() -> Iterator[Path]:
    with contextlib.suppress(RuntimeError):  # the user has no home
        yield cache_folder() / "kernels"
    yield Path(tempfile.gettempdir()) / f"scaleinv-kernels-{_user()}"


def _is_private(folder: Path) -> bool:
    """A folder that only we can write to, and that nobody else can replace by another."""
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or not _ours_alone(info):
        return False
    for parent in folder.absolute().parents:
        info = parent.stat()
        open_to_all = info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX
        if open_to_all or info.st_uid not in (0, _user()):
            return False
    return True


def _ours_alone(info: os.stat_result) -> bool:
    return info.st_uid == _user() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0  # Windows has a different kind of owner and reports 0


def _cpu() -> str:
    """What distinguishes CPUs that share a home folder: the instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
