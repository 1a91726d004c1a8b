"""The machine we run on: the CPU's name, and the user's cache folder."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def cpu_name() -> str:
    """The CPU's model name, or what comes nearest to it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or platform.processor() or platform.machine() or "unknown CPU"


def cache_folder() -> Path:
    """Where the package keeps what it can make again: ``$XDG_CACHE_HOME/scaleinv``, else ``~/.cache/scaleinv``.

    RuntimeError where the user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scaleinv"
