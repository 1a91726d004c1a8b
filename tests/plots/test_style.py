"""The common look: every method has one, and nothing leaks out of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from scaleinv import methods
from scaleinv.plots import style

matplotlib = pytest.importorskip("matplotlib")


def test_every_method_has_its_own_colour_and_the_method_is_black() -> None:
    assert set(methods.names()) <= set(style.METHODS)
    colors = [look.color for look in style.METHODS.values()]
    assert len(set(colors)) == len(colors)
    assert style.look("scale-invariant-p-rope").color == style.look("scale-invariant").color == "#000000"


def test_unknown_methods_are_named() -> None:
    with pytest.raises(ValueError, match="'magic'"):
        style.look("magic")


def test_settings_are_as_before_afterwards() -> None:
    before = dict(matplotlib.rcParams)
    with style.applied():
        assert matplotlib.rcParams["legend.frameon"] is False
    assert dict(matplotlib.rcParams) == before


def test_the_same_figure_gives_the_same_files(tmp_path: Path) -> None:
    files = []
    for folder in ("first", "second"):
        with style.applied():
            figure, (axis,) = style.panels(1)
            axis.plot([1, 2], [3, 4])
        files.append([path.read_bytes() for path in style.save(figure, tmp_path / folder, "figure")])
    assert files[0] == files[1]
    assert all(files[0])


def test_numbers_do_not_import_matplotlib() -> None:
    code = "import sys, scaleinv.analysis, scaleinv.plots.theory; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
