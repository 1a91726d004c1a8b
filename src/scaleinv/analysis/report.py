"""Everything that Gaussian scores can show, in one folder: figures 1 (top), 2 and 6, and the definitions, checked."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from scaleinv.analysis.figures import Progress, compared, context_figure, growth_figure, save_data
from scaleinv.analysis.verify import Verdict, verify
from scaleinv.logits import ALiBi, LogitTransform


@dataclasses.dataclass(frozen=True)
class Definitions:
    """The verdicts of `verify` by transform, then by definition."""

    verdicts: dict[str, dict[str, Verdict]]

    def save(self, folder: Path) -> list[Path]:
        """Write ``definitions.csv``, a line for each verdict, and ``definitions.json`` with the evidence."""
        rows = [
            {
                "method": method,
                "definition": definition,
                "holds": verdict.holds,
                "confidence": verdict.evidence.confidence,
                "statement": verdict.statement,
            }
            for method, verdicts in self.verdicts.items()
            for definition, verdict in verdicts.items()
        ]
        return save_data(folder, "definitions", rows, self)


def check_definitions(
    transforms: dict[str, LogitTransform] | None = None,
    longest: int = 1 << 20,
    samples: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Definitions:
    """`verify` for plain, LogN, ALiBi and scale-invariant logits, or for other transforms by name."""
    verdicts = {}
    for name, transform in (transforms or {**compared(), "alibi": ALiBi(heads=8)}).items():
        if progress:
            progress(f"definitions 3.1 – 3.4: {name}")
        verdicts[name] = verify(transform, longest=longest, samples=samples, seed=seed)
    return Definitions(verdicts)


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
    from scaleinv.plots import theory as plots  # pictures come after numbers: only this function needs them

    out = Path(out)
    transforms = compared()
    lengths = [2**k for k in range(7, longest.bit_length())]
    context = context_figure(lengths, samples, seed, progress=progress)
    paths = [*context.save(out), *plots.save_context(context, out)]
    for name, method in (("figure2", "scale-invariant"), ("figure6", "plain")):
        growth = growth_figure(name, method, transforms[method], longest, 4 * samples, seed, progress)
        paths += [*growth.save(out), *plots.save_growth(growth, out)]
    paths += check_definitions(longest=longest, samples=samples, seed=seed, progress=progress).save(out)
    return paths
