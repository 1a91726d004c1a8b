"""`scaleinv evaluate`: validation loss at any context length."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from scaleinv.cli.common import command


def add(commands: Any) -> None:
    parser = command(
        commands,
        "evaluate",
        run,
        "Validation loss of a run at any context length, on the same tokens.",
        "scaleinv evaluate runs/si --lengths 1x,4x,16x,64x",
    )
    option = parser.add_argument
    option("run_folder", metavar="RUN", type=Path, help="a run's folder")
    option("--lengths", default="1x,4x,16x", help="multiples of the training length, or tokens; default: 1x,4x,16x")
    option("--methods", help="rows to evaluate the model as: rope,rope+ntk,yarn for a RoPE-trained one")
    option("--tokens", type=int, help="held-out tokens to use at most; default: 524,288")
    option("--step", type=int, help="a checkpoint by its step; default: the newest weights")
    option("--out", type=Path, help="folder for the JSON; default: RUN/evaluations")
    option("--device", default="cpu", help="default: cpu")


def run(options: argparse.Namespace) -> None:
    from scaleinv.eval.loss import TOKENS, evaluate
    from scaleinv.progress import terminal

    rows = options.methods.split(",") if options.methods else None
    out = options.out or options.run_folder / "evaluations"
    results = evaluate(
        options.run_folder,
        options.lengths,
        rows=rows,
        tokens=TOKENS if options.tokens is None else options.tokens,
        step=options.step,
        device=options.device,
        out=out,
        progress=terminal,
    )
    for result in results:
        print(result.path(out))
