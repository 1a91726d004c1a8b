"""Evaluate, compare, look for needles, report."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from scaleinv.cli.common import Joined, command


def _add_evaluate(commands: Any) -> None:
    parser = command(
        commands,
        "evaluate",
        _evaluate,
        "Validation loss of a run at any context length, on the same tokens.",
        "scaleinv evaluate runs/si --lengths 1x,4x,16x,64x",
    )
    add = parser.add_argument
    add("run_folder", metavar="RUN", type=Path, help="a run's folder")
    add("--lengths", default="1x,4x,16x", help="multiples of the training length, or tokens; default: 1x,4x,16x")
    add("--methods", help="rows to evaluate the model as: rope,rope+ntk,yarn for a RoPE-trained one")
    add("--tokens", type=int, help="held-out tokens to use at most; default: 524,288")
    add("--step", type=int, help="a checkpoint by its step; default: the newest weights")
    add("--out", type=Path, help="folder for the JSON; default: RUN/evaluations")
    add("--device", default="cpu", help="default: cpu")


def _evaluate(options: argparse.Namespace) -> None:
    from scaleinv.eval.loss import TOKENS, evaluate
    from scaleinv.train.logs import terminal

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


def _add_compare(commands: Any) -> None:
    parser = command(
        commands,
        "compare",
        _compare,
        "Train every model and evaluate every row of the paper's table; stopped, the same command goes on.",
        "scaleinv compare --preset mini --methods all --seeds 3 --out results/mini",
    )
    add = parser.add_argument
    add("--methods", default="all", help="rows, comma-separated, or all; default: all")
    add("--out", required=True, type=Path, help="folder for runs, evaluations, summary.json and the report")
    add("--preset", default="mini", help="default: mini")
    add("--data", nargs="+", action=Joined, default="sotu", help="default: sotu, US State of the Union addresses")
    add("--val-data", nargs="+", action=Joined, help="default: documents held out of --data")
    add("--tokenizer", help="default: bytes for text")
    add("--seeds", type=int, default=3, help="default: 3")
    add("--steps", type=int, help="default: the preset's")
    add("--train-length", type=int, help="default: the preset's")
    add("--lengths", default="1x,4x,16x", help="default: 1x,4x,16x")
    add("--tokens", type=int, help="validation tokens; default: 524,288")
    add("--sweep", metavar="tau=…", help="also train the method with these lengthscales: tau=0.01,0.1,1,10,100")
    add("--device", default="auto", help="auto, cpu or cuda; default: auto")
    add("--jobs", type=int, help="processes at once; default: one a core, or one on a GPU")
    add("--no-report", action="store_true", help="do not write report.html")


def _compare(options: argparse.Namespace) -> int:
    import shlex

    from scaleinv.eval.compare import Comparison, Stopped, compare
    from scaleinv.plots.report import terminal_table, write_report
    from scaleinv.train.logs import terminal

    plan = Comparison(
        out=options.out,
        methods=options.methods.split(","),
        preset=options.preset,
        data=options.data,
        val_data=options.val_data,
        tokenizer=options.tokenizer,
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


def _add_report(commands: Any) -> None:
    parser = command(
        commands,
        "report",
        _report,
        "Make report.html, figures and tables of a comparison.",
        "scaleinv report results/mini",
    )
    parser.add_argument("folder", type=Path, help="what `scaleinv compare` wrote")


def _report(options: argparse.Namespace) -> None:
    from scaleinv.plots.report import write_report
    from scaleinv.train.logs import terminal

    print(write_report(options.folder, progress=terminal).resolve())


def _add_needle(commands: Any) -> None:
    parser = command(
        commands,
        "needle",
        _needle,
        "Needle in a haystack: fine-tune a run to answer, then ask it at longer contexts.",
        "scaleinv needle runs/si --lengths 1x,4x,16x",
    )
    add = parser.add_argument
    add("run_folder", metavar="RUN", type=Path, help="a run's folder")
    add("--lengths", default="1x,4x,16x", help="multiples of the training length, or tokens; default: 1x,4x,16x")
    add("--methods", help="rows to run the model as: rope,rope+ntk,yarn for a RoPE-trained one")
    add("--samples", type=int, help="haystacks at each length")
    add("--needles", type=int, help="needles in a haystack")
    add("--digits", type=int, help="digits of a needle's number")
    add("--cities", type=int, help="cities to choose from")
    add("--depth", type=float, help="where to put the needles, 0 to 1; default: anywhere")
    add("--steps", type=int, help="fine-tuning steps")
    add("--seed", type=int, default=0, help="of the haystacks; default: 0")
    add("--out", type=Path, help="folder for the results; default: RUN")
    add("--device", default="cpu", help="default: cpu")


def _needle(options: argparse.Namespace) -> None:
    from scaleinv.eval.needle import SAMPLES, default_task, run_needle
    from scaleinv.plots.compare import needle_depths
    from scaleinv.train.logs import terminal
    from scaleinv.train.store import read_config

    out = options.out or options.run_folder
    model = read_config(options.run_folder)[0].model
    task, training = default_task(model)
    changes = {name: getattr(options, name) for name in ("needles", "digits", "cities", "depth")}
    task = dataclasses.replace(task, **{name: value for name, value in changes.items() if value is not None})
    if options.steps is not None:
        training = training.scaled(options.steps)
    results = run_needle(
        options.run_folder,
        options.lengths,
        out,
        rows=options.methods.split(",") if options.methods else None,
        task=task,
        training=training,
        samples=SAMPLES if options.samples is None else options.samples,
        seed=options.seed,
        device=options.device,
        progress=terminal,
    )
    for row, result in results.items():
        for label, found in result["lengths"].items():
            print(f"{row:24}{label:>6}  {found['accuracy']:.3f}  [{found['low']:.3f}, {found['high']:.3f}]")
    heat = needle_depths(out / "needle", model.train_length)
    for path in heat.save(out / "figures") if heat else ():
        print(f"figure: {path.resolve()}")


COMMANDS = [_add_evaluate, _add_compare, _add_report, _add_needle]
