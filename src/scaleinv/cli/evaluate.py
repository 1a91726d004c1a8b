"""`scaleinv evaluate`: validation loss at any context length."""

from __future__ import annotations

import argparse
import os
from typing import Any

from scaleinv.cli.common import (
    add_device,
    add_lengths,
    add_methods,
    add_tolerance,
    command,
    count,
    device,
    number,
    path,
)


def add(commands: Any) -> None:
    parser = command(
        commands,
        "evaluate",
        run,
        "Validation loss of a run at any context length, on the same tokens.",
        "scaleinv evaluate runs/si --lengths 1x,4x,16x,64x",
    )
    option = parser.add_argument
    option("run_folder", metavar="RUN", type=path, help="a run's folder")
    add_lengths(parser)
    add_methods(parser)
    option("--tokens", type=count, help="use at most this many held-out tokens; default: 524,288")
    option("--step", type=number(int, least=0), help="a checkpoint by its step; default: the newest weights")
    add_tolerance(parser)
    option("--out", type=path, help="folder for the JSON; default: RUN/evaluations")
    option(
        "--context-parallel",
        type=count,
        default=1,
        metavar="N",
        help="how many of torchrun's ranks share each window; default: 1",
    )
    add_device(parser)


def run(options: argparse.Namespace) -> None:
    where = device(options.device)

    from scaleinv.eval.loss import TOKENS, evaluate
    from scaleinv.progress import terminal

    out = options.out or options.run_folder / "evaluations"
    results = evaluate(
        options.run_folder,
        options.lengths,
        methods=options.methods,
        tokens=TOKENS if options.tokens is None else options.tokens,
        step=options.step,
        tolerance=options.tolerance,
        device=where,
        out=out,
        progress=terminal,
        context_parallel=options.context_parallel,
    )
    if int(os.environ.get("RANK", 0)) == 0:
        for result in results:
            print(result.path(out))
