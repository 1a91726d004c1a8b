"""One look for all figures: a fixed colour for each method, readable fonts, and saving as PNG and SVG.

matplotlib is imported when the first figure is made, and without pyplot: no window, no global state.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleinv.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Look:
    """How a method is drawn. The marker and the dashes tell methods apart where colour does not."""

    label: str
    color: str
    marker: str = "o"
    dashes: str = "-"


# Paul Tol's "muted" and "vibrant" schemes, which colour-blind readers can tell apart; the method is black.
METHODS: dict[str, Look] = {
    "rope": Look("RoPE", "#CC6677", "o"),
    "p-rope": Look("p-RoPE", "#DDCC77", "s"),
    "nope": Look("NoPE", "#882255", "v", ":"),
    "rope+ntk": Look("RoPE + NTK", "#AA4499", "^", "--"),
    "yarn": Look("YaRN", "#EE7733", "D", "--"),
    "logn+rope": Look("LogN + RoPE", "#332288", "o"),
    "logn+p-rope": Look("LogN + p-RoPE", "#0077BB", "s"),
    "logn+ntk": Look("LogN + NTK", "#88CCEE", "^", "--"),
    "alibi": Look("ALiBi", "#117733", "D"),
    "scale-invariant-p-rope": Look("Scale-invariant + p-RoPE", "#000000", "o"),
    "scale-invariant-rope": Look("Scale-invariant + RoPE", "#666666", "s", "--"),
    "scale-invariant-nope": Look("Scale-invariant + NoPE", "#AAAAAA", "v", ":"),
    "infini-rope": Look("Infini-attention + RoPE", "#999933", "o", "-."),
    "infini-p-rope": Look("Infini-attention + p-RoPE", "#44AA99", "s", "-."),
    "yarn-no-factor": Look("YaRN without its factor", "#EE3377", "X", ":"),
    "scale-invariant-rope+yarn": Look("Scale-invariant + RoPE, YaRN frequencies", "#CC3311", "D", "--"),
    "scale-invariant-rope+ntk": Look("Scale-invariant + RoPE + NTK", "#33BBEE", "^", "--"),
}

# The variants of a pretrained model that no method is called like: they take the look of the method that they are.
VARIANTS: dict[str, Look] = {
    "stock": dataclasses.replace(METHODS["rope"], label="Stock"),
    "scale-invariant": dataclasses.replace(METHODS["scale-invariant-rope"], label="Scale-invariant"),
    "scale-invariant+yarn": dataclasses.replace(
        METHODS["scale-invariant-rope+yarn"], label="Scale-invariant, YaRN frequencies"
    ),
    "scale-invariant-fitted": Look("Scale-invariant, fitted", "#33BBEE", "s", "--"),
    "scale-invariant-fitted+yarn": Look("Scale-invariant, fitted, YaRN frequencies", "#0077BB", "D"),
}

# The logit transforms alone, as in theory: they take the colour of a method that has them.
TRANSFORMS: dict[str, Look] = {
    "plain": Look("Plain", METHODS["rope"].color, "s"),
    "logn": Look("LogN", METHODS["logn+p-rope"].color, "^", "--"),
    "alibi": Look("ALiBi", METHODS["alibi"].color, "D"),
    "scale-invariant": Look("Scale-invariant", METHODS["scale-invariant-p-rope"].color, "o"),
}

RATIOS = ("#000000", "#0077BB", "#EE7733")
"""For the curves of Δ = 2, 5, 10."""

RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so figures look alike everywhere
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "svg.hashsalt": "scaleinv",  # the same data give the same file
}


def known(method: str) -> Look | None:
    """How a method of `scaleinv.methods`, or a variant of `scaleinv.adaptation`, is drawn; None for another one."""
    return METHODS.get(method) or VARIANTS.get(method)


def look(method: str) -> Look:
    """How a method of `scaleinv.methods`, or a logit transform by name, is drawn."""
    found = METHODS.get(method) or TRANSFORMS.get(method)
    if found is None:
        raise ValueError(f"method must be one of {', '.join([*METHODS, *TRANSFORMS])}, got {method!r}")
    return found


def require() -> None:
    """Raise ImportError that says what to install if matplotlib is missing: call it before long work."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'scaleinv[plots]'") from error


@contextlib.contextmanager
def applied() -> Iterator[None]:
    """A context with our look, for figures made and saved inside; matplotlib's settings are restored afterwards."""
    require()
    import matplotlib

    with matplotlib.rc_context(RC):
        yield


def panels(columns: int, width: float = 4.0, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    """A figure with a row of panels, sizes in inches; to be called under `applied`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write ``{name}.png`` (200 dots per inch) and ``{name}.svg``; returns their paths."""
    png, svg = Path(folder) / f"{name}.png", Path(folder) / f"{name}.svg"
    with applied():
        with replacing(png) as temporary:
            figure.savefig(temporary, dpi=200)
        with replacing(svg) as temporary:
            figure.savefig(temporary, metadata={"Date": None})
    return [png, svg]
