"""`scaleinv analyze`: is attention scale-invariant? In theory, and inside a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from scaleinv.cli.common import add_lengths, command, path, text


def add(commands: Any) -> None:
    parser = command(
        commands,
        "analyze",
        run,
        "Is attention scale-invariant? In theory, and inside a model.",
        "scaleinv analyze theory --out figures/",
        "scaleinv analyze model runs/si --lengths 1x,4x,16x",
        "scaleinv analyze model path/to/hf-model --text book.txt",
    )
    option = parser.add_argument
    option("what", choices=("theory", "model"), help="Gaussian logits, or a trained model")
    option("path", nargs="?", type=text, help="with model: a run's folder, or a Hugging Face model's folder or id")
    add_lengths(parser)
    option("--text", type=path, help="text to run the model on; default: the run's validation data")
    option("--out", type=path, default=Path("figures"), help="folder for figures and data; default: figures")


def run(options: argparse.Namespace) -> None:
    from scaleinv import reports
    from scaleinv.progress import terminal

    if options.what == "theory":
        written = reports.theory_report(options.out, progress=terminal)
    elif options.path is None:
        raise ValueError("analyze model needs a PATH: a run's folder, or a Hugging Face model's")
    else:
        lengths = options.lengths.split(",")
        written = reports.analyze_model(options.path, lengths, text=options.text, out=options.out, progress=terminal)
    for file in written:
        print(file)
