"""Imports point one way: a package imports only what stands before it in `ORDER`."""

import ast
from pathlib import Path

import pytest

import scaleinv

SOURCE = Path(scaleinv.__file__).parent

ORDER = (
    *(
        "version",
        "lazy",
        "constants",
        "settings",
        "files",
        "lengths",
        "progress",
        "machine",
        "hub",
        "schedule",
        "logits",
        "rotary",
        "methods",
        "adaptation",
        "ops",
        "distributed",
        "doctor",
    ),
    *("model", "data", "train", "eval", "hf", "analysis", "plots", "reports", "cli"),
)

BACKENDS = ({"reference"}, {"flex"}, {"triton"}, {"blocked", "native", "operator"})
"""Modules of `scaleinv.ops` that make up a backend: none imports another's."""


def imported(source: str, package: str = "scaleinv") -> set[str]:
    """Full names of what a file imports from scaleinv, anywhere in it: in functions and under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "scaleinv"}


def files() -> dict[str, Path]:
    """The files of the package by their path in it; the top of the package itself may import anything."""
    paths = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}
    return {name: path for name, path in paths.items() if name not in ("__init__.py", "__main__.py")}


def part(name: str) -> str:
    """The package, or module at the top, that a path or a full name belongs to."""
    return name.split("/")[0].removesuffix(".py") if name.endswith(".py") else f"{name}.".split(".")[1]


def package(name: str) -> str:
    return ".".join(["scaleinv", *name.split("/")[:-1]])


def breaches(name: str, source: str) -> list[str]:
    """What the file ``name`` imports from itself on down the order, or from the top of the package."""
    here = ORDER.index(part(name))
    return sorted(
        target
        for target in imported(source, package(name))
        if part(target) not in ORDER or (part(target) != part(name) and ORDER.index(part(target)) > here)
    )


def test_every_package_has_its_place() -> None:
    assert {part(name) for name in files()} <= set(ORDER)


@pytest.mark.parametrize("name", files())
def test_imports_point_up(name: str) -> None:
    assert breaches(name, files()[name].read_text(encoding="utf-8")) == []


def test_backends_do_not_import_each_other() -> None:
    for own in BACKENDS:
        others = set().union(*BACKENDS) - own
        for module in sorted(own):
            path = SOURCE / "ops" / f"{module}.py"
            if path.exists():
                names = imported(path.read_text(encoding="utf-8"), "scaleinv.ops")
                assert not {name for name in names if name.split(".")[1:2] == ["ops"] and name.split(".")[2] in others}


@pytest.mark.parametrize(
    "source",
    [
        "from scaleinv.plots import style",
        "from scaleinv import plots",
        "import scaleinv.plots.style",
        "def draw():\n    from scaleinv.plots.style import save",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from scaleinv.reports import theory",
        "from ..plots import style",
        "import scaleinv",
    ],
)
def test_a_breach_is_found(source: str) -> None:
    assert breaches("analysis/model.py", source)


@pytest.mark.parametrize(
    "source", ["from scaleinv.hf import config", "from scaleinv import files", "from . import ranges", "import json"]
)
def test_what_points_up_is_no_breach(source: str) -> None:
    assert breaches("analysis/model.py", source) == []
