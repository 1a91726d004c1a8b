"""The paper's own numbers (arXiv 2505.17083): validation loss and needles found, by method."""

from __future__ import annotations

SETTING = "paper, 162 M parameters, 4k training length"
TRAIN_LENGTH = 4096
LENGTHS = ("1x", "4x", "16x")

# Validation loss, mean of 3 seeds, and needle accuracy after 300 steps of fine-tuning, at LENGTHS.
LOSS: dict[str, tuple[float, float, float]] = {
    "rope": (3.261, 3.936, 5.260),
    "p-rope": (3.260, 3.984, 5.735),
    "nope": (3.397, 6.430, 8.125),
    "rope+ntk": (3.261, 3.703, 5.430),
    "yarn": (3.261, 3.958, 5.353),
    "logn+rope": (3.260, 3.273, 3.378),
    "logn+p-rope": (3.256, 3.262, 3.317),
    "logn+ntk": (3.261, 3.272, 3.394),
    "alibi": (3.281, 3.272, 3.270),
    "scale-invariant-p-rope": (3.244, 3.235, 3.247),
    "infini-rope": (3.296, 3.302, 3.310),
    "infini-p-rope": (3.295, 3.303, 3.311),
}
NEEDLE: dict[str, tuple[float, float, float]] = {
    "rope": (0.962, 0.000, 0.000),
    "p-rope": (0.966, 0.250, 0.000),
    "nope": (0.964, 0.303, 0.000),
    "rope+ntk": (0.962, 0.217, 0.000),
    "yarn": (0.969, 0.000, 0.000),
    "logn+rope": (0.965, 0.276, 0.064),
    "logn+p-rope": (0.969, 0.962, 0.939),
    "logn+ntk": (0.962, 0.253, 0.056),
    "alibi": (0.957, 0.020, 0.003),
    "scale-invariant-p-rope": (0.965, 0.969, 0.969),
}
