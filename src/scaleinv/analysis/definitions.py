"""Definitions 3.1 – 3.4 checked for several transforms at once: a table of verdicts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from scaleinv.analysis.figures import Progress, compared
from scaleinv.analysis.verify import Verdict, verify
from scaleinv.files import write_data
from scaleinv.logits import ALiBi, LogitTransform


@dataclasses.dataclass(frozen=True)
class Definitions:
    """The verdicts of `verify` by transform, then by definition."""

    verdicts: dict[str, dict[str, Verdict]]

    def save(self, folder: Path) -> list[Path]:
        """Write ``definitions.csv``, one line per verdict, and ``definitions.json`` with the evidence."""
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
        return write_data(folder, "definitions", rows, self)


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
