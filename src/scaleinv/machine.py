"""The machine we run on: the CPU's name, the user's cache folder, devices and their arithmetic, memory that ran out."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Precision = Literal["auto", "float32", "bfloat16"]
"""The arithmetic that trains a model with weights in float32; auto is bfloat16 on a GPU and float32 on a CPU."""


def arithmetic(precision: Precision, kind: str) -> Literal["float32", "bfloat16"]:
    """The dtype of a precision's matrix products on a kind of device, cpu or cuda."""
    if precision == "auto":
        return "bfloat16" if kind == "cuda" else "float32"
    return precision


def cpu_name() -> str:
    """The CPU's model name, or the closest thing to it that the system reports."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or platform.processor() or platform.machine() or "unknown CPU"


def cache_folder() -> Path:
    """The folder for what can be made again: ``$XDG_CACHE_HOME/scaleinv``, else ``~/.cache/scaleinv``.

    Raises RuntimeError if the user has no home folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scaleinv"


def find_device(name: str) -> torch.device:
    """The device that a name stands for ("auto" takes a GPU if there is one); ValueError if it is not available."""
    if re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", str(name)) is None:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    import torch

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if available else "cpu"
    if name != "cpu" and int(name[5:] or 0) >= available:
        raise ValueError(f"device {name} is not available: torch finds {available or 'no'} CUDA devices; use cpu")
    return torch.device(name)


def is_about_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out; torch's allocators raise a plain RuntimeError."""
    words = ("not enough memory", "out of memory", "can't allocate memory")
    said = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    return said or isinstance(error, MemoryError)
