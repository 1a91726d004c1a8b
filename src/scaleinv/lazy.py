"""Names of a package that are imported when they are first used, so that importing the package costs nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def attach(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a lazy package (PEP 562).

    Args:
        package: the package's ``__name__``.
        names: the module of the package that holds each name; a module of the package names itself, with "".
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{names[name] or name}")
        value = getattr(module, name) if names[name] else module
        setattr(sys.modules[package], name, value)  # the next look-up finds it there
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return get, listing
