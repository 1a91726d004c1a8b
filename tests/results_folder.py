"""A results folder with everything in it, for the tests of the report."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

TRAIN_LENGTH = 512
EXTRA = """a<b> & "c" 'd'"""
"""A method that nobody knows, of characters that HTML minds."""

LOSSES = {
    "rope": (1.145, 1.384, 2.198),
    "rope+ntk": (1.145, 1.306, 2.183),
    "logn+p-rope": (1.162, 1.188, 1.254),
    "alibi": (1.257, 1.248, 1.246),
    "scale-invariant-p-rope": (1.146, 1.141, 1.141),
    EXTRA: (1.4, 1.5, 1.6),
}
NEEDLE = {"rope": (0.95, 0.1, 0.0), "alibi": (0.93, 0.2, 0.0), "scale-invariant-p-rope": (0.96, 0.97, 0.955)}
KEYS = ("1x", "4x", "16x")
SEED = (0.0, 0.004)
"""What each seed adds to every loss."""
OWN = 0.004
"""What the second seed adds to the losses of methods other than the paper's."""


def write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")


def make_results(folder: Path) -> Path:
    """A results folder with everything in it, as `scaleinv compare` and `scaleinv needle` write them."""
    loss = {
        row: {key: {"mean": mean, "stderr": 0.004, "seeds": 2} for key, mean in zip(KEYS, means, strict=True)}
        for row, means in LOSSES.items()
    }
    found = {
        row: {
            key: {"accuracy": p, "low": max(p - 0.05, 0), "high": min(p + 0.03, 1), "samples": 64}
            for key, p in zip(KEYS, values, strict=True)
        }
        for row, values in NEEDLE.items()
    }
    settings = {
        "train_length": TRAIN_LENGTH,
        "preset": "mini",
        "steps": 400,
        "batch_tokens": 4096,
        "tokens": {"tokenizer": "bytes", "vocabulary": 257},
        "validation_tokens": 262_144,
        "training_validation_tokens": 65_536,
        "parameters": {"rope": 852_000, "alibi": 851_000},
        "data": "sotu",
        "command": "scaleinv compare --preset mini --out '<results>'",
        "versions": {"torch": "2.13", "scaleinv": "0.1"},
        "corpus_sha256": None,
        "needle": {"train_length": TRAIN_LENGTH, "training": {"steps": 900}, "base": {"steps": 600}},
    }
    write(folder / "summary.json", {"loss": loss, "needle": found, "settings": settings})
    for seed in (0, 1):
        for number, (row, means) in enumerate(LOSSES.items()):
            lengths = {}
            for key, mean in zip(KEYS, means, strict=True):
                length = TRAIN_LENGTH * int(key[:-1])
                edges = [0, *(2**k for k in range(length.bit_length()))]
                drift = (means[2] - means[0]) / 2
                positions = [
                    (low, high, means[0] + 3 / high + drift * max(0, math.log2(high / TRAIN_LENGTH)) + 0.002 * seed)
                    for low, high in itertools.pairwise(edges)
                ]
                own = OWN * seed * (row != "scale-invariant-p-rope")
                at = {"length": length, "mean": mean + SEED[seed] + own, "stderr": 0.01, "windows": 8}
                at["positions"] = positions
                lengths[key] = at
            name = f"row{number}" if row == EXTRA else row
            data = {"row": row, "seed": seed, "model": row, "train_length": TRAIN_LENGTH, "lengths": lengths}
            data |= {"tokens": 8 * TRAIN_LENGTH, "step": None, "weights": "0" * 64}
            write(folder / "evaluations" / f"{name}-seed{seed}.json", data)
            if row in (EXTRA, "rope+ntk"):
                continue
            lines = []
            for step in range(0, 601, 2):
                line: dict[str, Any] = {
                    "step": step,
                    "tokens_per_second": 4096.0 if step else 0.0,
                    "loss": means[0] + 4 * math.exp(-step / 60) + 0.05 * math.sin(step),
                }
                if step % 50 == 0:
                    late = {key: mean + 4 * math.exp(-step / 60) for key, mean in zip(KEYS, means, strict=True)}
                    line["validation"] = late
                lines.append(json.dumps(line) + "\n")
            write(folder / "curves" / f"{row}-seed{seed}.jsonl", "".join(lines) + '{"step": 60')
    write(folder / "curves" / "scale-invariant-p-rope-tau0.1-seed0.jsonl", '{"step": 0, "loss": 9.0}\n')
    sweep = {
        tau: {key: {"mean": 1.14 + 0.02 * abs(math.log10(float(tau)) - 1) * i, "stderr": 0.003, "seeds": 2}
              for i, key in enumerate(KEYS)}
        for tau in ("100", "0.01", "10", "0.1", "1")
    }  # fmt: skip
    write(folder / "sweep.json", {"tau": sweep})
    for row, values in NEEDLE.items():
        lengths = {}
        for key, p in zip(KEYS, values, strict=True):
            depths = [
                {"from": i / 5, "to": (i + 1) / 5, "needles": 40,
                 "accuracy": min(1.0, p * (0.8 + 0.05 * i)), "low": 0.0, "high": 1.0}
                for i in range(5)
            ]  # fmt: skip
            at = {**found[row][key], "length": TRAIN_LENGTH * int(key[:-1]), "depths": depths}
            lengths[key] = at
        write(folder / "needle" / f"{row}.json", {"row": row, "seed": 0, "settings": {}, "lengths": lengths})
    write(folder / "analysis" / "figure2.svg", '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"/>')
    return folder
