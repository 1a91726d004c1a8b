"""`scaleinv train`: train a GPT with any method."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from scaleinv.cli.common import command, device, path
from scaleinv.cli.options import RUN, add_options, given


def add(commands: Any) -> None:
    parser = command(
        commands,
        "train",
        run,
        "Train a GPT with any method. If interrupted, continue with --resume.",
        "scaleinv train --preset mini --method scale-invariant-p-rope --data stdlib --out runs/si",
        'scaleinv train --data "books/*.txt" --steps 400 --lr-matrices 0.01 --out runs/slow',
        "scaleinv train --config run.toml --seed 1",
        "scaleinv train --resume runs/si",
    )
    parser.add_argument("--resume", type=path, metavar="DIR", help="continue the run in DIR from its last checkpoint")
    add_options(parser, RUN, {"out": "runs/PRESET-METHOD-seedN"})


def run(options: argparse.Namespace) -> int:
    values = given(options, RUN)
    device(values.get("device", "auto"))

    from scaleinv import train
    from scaleinv.progress import terminal
    from scaleinv.train.store import read_config

    if options.resume:
        fixed = [f"--{name.replace('_', '-')}" for name in values if not RUN[name].resume]
        if fixed:
            raise ValueError(f"--resume continues the run as it was: {', '.join(fixed)} cannot be changed")
        config, _ = read_config(options.resume)
        config = dataclasses.replace(config, **values, out=str(options.resume))
    else:
        name = values.pop("preset", "mini")
        config = train.preset(name, **values)
        if "out" not in values:
            config = dataclasses.replace(config, out=f"runs/{name}-{config.model.method}-seed{config.seed}")
    result = train.run(config, resume=bool(options.resume), progress=terminal)
    return 0 if result.finished else 128 + (result.signal or 15)
