"""`scaleinv needle`: needle in a haystack."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any, get_args

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
from scaleinv.machine import Precision


def add(commands: Any) -> None:
    parser = command(
        commands,
        "needle",
        run,
        "Needle in a haystack: fine-tune models to answer, then ask them at longer contexts.",
        "scaleinv needle runs/si --lengths 1x,4x,16x",
        "scaleinv needle results/new --methods rope,scale-invariant-p-rope",
    )
    option = parser.add_argument
    option("folder", metavar="RUN", type=path, help="a run's folder, or a comparison's: all of its models")
    add_lengths(parser)
    add_methods(parser)
    option("--samples", type=count, help="haystacks per length; default: 100")
    option("--needles", type=count, help="needles per haystack; default: the preset's")
    option("--digits", type=count, help="digits of a needle's number; default: the preset's")
    option("--cities", type=count, help="cities to choose from; default: the preset's")
    option("--depth", type=number(float, least=0, most=1), help="where to put the needles, 0 to 1; default: anywhere")
    option("--steps", type=count, help="fine-tuning steps; default: the preset's")
    option(
        "--precision",
        choices=get_args(Precision),
        help="arithmetic of fine-tuning; default: auto, bfloat16 on a GPU and float32 on a CPU",
    )
    option("--seed", type=number(int, least=0), help="seed of the haystacks; default: the run's")
    option("--jobs", type=count, help="processes at once for a comparison; default: one per core, or one on a GPU")
    option("--out", type=path, help="folder for the results; default: RUN")
    add_tolerance(parser)
    add_device(parser)


def run(options: argparse.Namespace) -> int:
    where = device(options.device)

    from scaleinv.eval.needle import SAMPLES, default_task, run_needle
    from scaleinv.eval.needle_compare import first_config, is_comparison, needle_comparison
    from scaleinv.eval.workers import Stopped
    from scaleinv.plots.needle import read_depths
    from scaleinv.progress import Terminal

    out, many = options.out or options.folder, is_comparison(options.folder)
    if options.jobs is not None and not many:
        raise ValueError(f"--jobs is for a comparison's folder, and {options.folder} is not one")
    model = first_config(options.folder).model
    task, training = default_task(model)
    changes = {name: getattr(options, name) for name in ("needles", "digits", "cities", "depth")}
    task = dataclasses.replace(task, **{name: value for name, value in changes.items() if value is not None})
    if options.steps is not None:
        training = training.scaled(options.steps)
    if options.precision is not None:
        training = dataclasses.replace(training, precision=options.precision)
    given: dict[str, Any] = {
        "methods": options.methods,
        "task": task,
        "training": training,
        "samples": SAMPLES if options.samples is None else options.samples,
        "seed": options.seed,
        "device": where,
        "tolerance": options.tolerance,
    }
    try:
        if many:
            every = {"jobs": options.jobs, "progress": Terminal(every=30)}
            results = needle_comparison(options.folder, options.lengths, out, **given, **every)
        else:
            results = run_needle(options.folder, options.lengths, out, **given, progress=Terminal())
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return 128 + stopped.signal
    for method, result in results.items():
        for label, found in result["lengths"].items():
            print(f"{method:28}{label:>6}  {found['accuracy']:.3f}  [{found['low']:.3f}, {found['high']:.3f}]")
    heat = read_depths(out / "needle", model.train_length)
    for file in heat.save(out / "figures") if heat else ():
        print(f"figure: {file.resolve()}")
    return 0
