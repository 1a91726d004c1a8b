"""Everything that Gaussian scores can show, in one folder: figures 1 (top), 2 and 6, and the definitions, checked."""

from __future__ import annotations

from pathlib import Path

from scaleinv.analysis.definitions import check_definitions
from scaleinv.analysis.figures import Progress, compared, context_figure, growth_figure
from scaleinv.plots import theory as plots
from scaleinv.reports.folder import claim


def theory_report(
    out: Path, progress: Progress | None = None, longest: int = 1 << 20, samples: int = 1000, seed: int = 0
) -> list[Path]:
    """Write all of it to ``out`` as CSV, JSON, PNG and SVG, and return the paths. Takes half a minute on two cores.

    Each part is written as soon as it is done, so an interrupted run leaves what it has. Needs matplotlib.

    Args:
        progress: called with one line of text before each step.
        longest: the longest context, in tokens.
        samples: for each point of figure 1 and each range of the checks; figures 2 and 6 take four times as many.
    """
    out = Path(out)
    settings = {"longest": longest, "samples": samples, "seed": seed}
    claimed = claim(out, ("theory.json", "figure1-gaussian.json"), settings)
    transforms = compared()
    lengths = [2**k for k in range(7, longest.bit_length())]
    context = context_figure(lengths, samples, seed, progress=progress)
    paths = [claimed, *context.save(out), *plots.save_context(context, out)]
    for name, method in (("figure2", "scale-invariant"), ("figure6", "plain")):
        growth = growth_figure(name, method, transforms[method], longest, 4 * samples, seed, progress)
        paths += [*growth.save(out), *plots.save_growth(growth, out)]
    paths += check_definitions(longest=longest, samples=samples, seed=seed, progress=progress).save(out)
    return paths
