"""`scaleinv needle`: needle in a haystack."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from scaleinv.cli.common import command


def add(commands: Any) -> None:
    parser = command(
        commands,
        "needle",
        run,
        "Needle in a haystack: fine-tune a run to answer, then ask it at longer contexts.",
        "scaleinv needle runs/si --lengths 1x,4x,16x",
    )
    option = parser.add_argument
    option("run_folder", metavar="RUN", type=Path, help="a run's folder")
    option("--lengths", default="1x,4x,16x", help="multiples of the training length, or tokens; default: 1x,4x,16x")
    option("--methods", help="rows to run the model as: rope,rope+ntk,yarn for a RoPE-trained one")
    option("--samples", type=int, help="haystacks at each length")
    option("--needles", type=int, help="needles in a haystack")
    option("--digits", type=int, help="digits of a needle's number")
    option("--cities", type=int, help="cities to choose from")
    option("--depth", type=float, help="where to put the needles, 0 to 1; default: anywhere")
    option("--steps", type=int, help="fine-tuning steps")
    option("--seed", type=int, default=0, help="of the haystacks; default: 0")
    option("--out", type=Path, help="folder for the results; default: RUN")
    option("--device", default="cpu", help="default: cpu")


def run(options: argparse.Namespace) -> None:
    from scaleinv.eval.needle import SAMPLES, default_task, run_needle
    from scaleinv.plots.compare import needle_depths
    from scaleinv.progress import terminal
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
