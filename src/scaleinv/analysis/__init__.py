"""Is attention scale-invariant? Numbers, no pictures: `scaleinv.plots` draws them and `scaleinv.reports` writes both.

- `ranges`: totals, entropies and shares over ranges of distances, from any logits
- `gaussian`, `tail`: logits of independent Gaussian scores, and fast samples of their sums
- `theory`, `growth`: closed forms and expected entropies over [t, tΔ), and how they grow with t
- `verify`: Definitions 3.1 – 3.4 as checks with evidence
- `definitions`: the same for several transforms
- `figures`: the numbers of the paper's figures 1 (top), 2 and 6
- `capture`: the queries and keys that reach attention in a model, ours or Hugging Face's (`capture_hf`)
- `paired`: differences between methods on the same seeds and windows
- `model`, `scores`, `calibrate`: where a model's attention goes, whether its scores are Gaussian, and factors for them
- `sparsity`: how much of its cache each layer and head needs
"""

from scaleinv.analysis.calibrate import Calibration, calibrate
from scaleinv.analysis.capture import Layer, capture
from scaleinv.analysis.definitions import Definitions, check_definitions
from scaleinv.analysis.figures import ContextFigure, GrowthFigure, context_figure, growth_figure
from scaleinv.analysis.gaussian import sample_logits, sample_ranges
from scaleinv.analysis.growth import Fit, fit
from scaleinv.analysis.model import LengthStatistics, ModelStatistics, model_statistics
from scaleinv.analysis.ranges import Estimate, RangeAccumulator, RangeSums, entropy, estimate, range_sums, recent_share
from scaleinv.analysis.scores import Scores, ScoreStatistics, score_statistics
from scaleinv.analysis.sparsity import Sparsity
from scaleinv.analysis.theory import (
    RangeExpectation,
    expected_range_entropy,
    expected_ranges,
    mean_negentropy,
    mean_weight,
)
from scaleinv.analysis.verify import Evidence, Verdict, verify

__all__ = [
    "Calibration",
    "ContextFigure",
    "Definitions",
    "Estimate",
    "Evidence",
    "Fit",
    "GrowthFigure",
    "Layer",
    "LengthStatistics",
    "ModelStatistics",
    "RangeAccumulator",
    "RangeExpectation",
    "RangeSums",
    "ScoreStatistics",
    "Scores",
    "Sparsity",
    "Verdict",
    "calibrate",
    "capture",
    "check_definitions",
    "context_figure",
    "entropy",
    "estimate",
    "expected_range_entropy",
    "expected_ranges",
    "fit",
    "growth_figure",
    "mean_negentropy",
    "mean_weight",
    "model_statistics",
    "range_sums",
    "recent_share",
    "sample_logits",
    "sample_ranges",
    "score_statistics",
    "verify",
]
