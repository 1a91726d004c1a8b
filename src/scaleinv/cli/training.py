"""Train, prepare data, generate text."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from scaleinv.cli.common import Joined, command

_PRESET_OPTIONS = ("preset", "method", "train_length")
_MODEL_OPTIONS = ("tau", "learnable_tau")
_RUN_OPTIONS = (
    "data",
    "val_data",
    "tokenizer",
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


def _add_train(commands: Any) -> None:
    parser = command(
        commands,
        "train",
        _train,
        "Train a GPT with any method; stop it at any time and go on with --resume.",
        "scaleinv train --preset mini --method scale-invariant-p-rope --data stdlib --out runs/si",
    )
    add = parser.add_argument
    add("--preset", help="mini (minutes on a CPU), 162m or 304m (the paper's); default: mini")
    add("--method", help="a row of the paper's table, see `scaleinv methods`; default: scale-invariant-p-rope")
    add("--train-length", type=int, help="tokens in a training sequence; default: the preset's")
    add("--tau", type=float, help="lengthscale of the scale-invariant methods in tokens; default: 10")
    add("--learnable-tau", action="store_true", default=None, help="learn a lengthscale for each head")
    add(
        "--data",
        nargs="+",
        action=Joined,
        help="stdlib, sotu, text files or a glob, .bin shards, or a Hugging Face dataset; default: stdlib",
    )
    add(
        "--val-data",
        nargs="+",
        action=Joined,
        help="validation data of the same kinds; default: documents held out of --data",
    )
    add("--tokenizer", help="bytes, gpt2, bpe, bpe:SIZE or a folder; default: the shards' own, bytes for text")
    add("--steps", type=int, help="optimiser steps; default: the preset's")
    add("--seed", type=int, help="of the initial weights; default: 0")
    add("--out", help="the run's folder; default: runs/PRESET-METHOD-seedN")
    add("--resume", metavar="DIR", help="go on with the run in DIR, from its last whole checkpoint")
    add("--checkpoint-every", type=int, metavar="STEPS", help="default: the preset's")
    add("--keep", type=int, help="checkpoints to keep; default: 3")
    add("--batch-tokens", type=int, help="tokens in an optimiser step, over all ranks")
    add("--micro-tokens", type=int, help="tokens in one forward pass of one rank: lower it if memory runs out")
    add("--document-masks", action="store_true", default=None, help="packed documents do not see each other")
    add("--clip", type=float, help="largest norm of the gradient; default: no clipping")
    add("--val-every", type=int, metavar="STEPS", help="default: the preset's")
    add("--val-tokens", type=int, help="tokens to validate on, at every length")
    add("--device", help="auto, cpu or cuda; default: auto")
    add("--parallel", choices=("ddp", "fsdp"), help="how torchrun's ranks share the model; default: ddp")
    add("--compile", action=argparse.BooleanOptionalAction, default=None, help="torch.compile; default: on a GPU")
    add("--wandb", metavar="PROJECT", help="report to Weights & Biases too")


def _train(options: argparse.Namespace) -> int:
    from scaleinv import train
    from scaleinv.train.logs import terminal
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
    result = train.run(config, resume=bool(options.resume), say=terminal)
    return 0 if result.finished else 128 + (result.signal or 15)


def _add_prepare(commands: Any) -> None:
    parser = command(
        commands,
        "prepare",
        _prepare,
        "Turn text into .bin token shards, in parallel.",
        "scaleinv prepare --text path/to/books --tokenizer gpt2 --out shards/",
    )
    add = parser.add_argument
    add("--text", required=True, nargs="+", action=Joined, help="files, a folder, a glob, or a corpus by name")
    add("--tokenizer", default="gpt2", help="bytes, gpt2, bpe, bpe:SIZE or a folder; default: gpt2")
    add("--out", required=True, type=Path, help="an empty or new folder")
    add("--shard-tokens", type=int, default=100_000_000, help="tokens in a shard; default: 100 million")
    add("--workers", type=int, help="processes; default: one a core")
    add("--val-fraction", type=float, default=0.01, help="share of the documents held out; default: 0.01")


def _prepare(options: argparse.Namespace) -> None:
    from scaleinv.data import prepare
    from scaleinv.train.logs import terminal

    written = prepare(
        options.text,
        options.tokenizer,
        options.out,
        shard_tokens=options.shard_tokens,
        workers=options.workers,
        progress=terminal,
        val_fraction=options.val_fraction,
    )
    for path in written:
        print(path)


def _add_generate(commands: Any) -> None:
    parser = command(
        commands,
        "generate",
        _generate,
        "Write text with a trained model, as it is made.",
        'scaleinv generate runs/si --prompt "def main("',
    )
    add = parser.add_argument
    add("run_folder", metavar="RUN", help="a run's folder")
    add("--prompt", default="", help="what the text begins with; default: a new document")
    add("--tokens", type=int, default=300, help="tokens to write at most; default: 300")
    add("--temperature", type=float, default=0.8, help="0 takes the likeliest token each time; default: 0.8")
    add("--top-k", type=int, help="choose among the k likeliest tokens")
    add("--top-p", type=float, help="choose among the likeliest tokens that make up this probability")
    add("--seed", type=int, help="for the same text again")
    add("--method", help="run a RoPE-trained model as rope+ntk or yarn")
    add("--device", default="cpu", help="default: cpu")


def _generate(options: argparse.Namespace) -> None:
    import torch

    from scaleinv.eval import generate
    from scaleinv.train.store import load_model, run_tokenizer

    model, _ = load_model(options.run_folder, options.device)
    if options.method:
        model.use_method(options.method)
    tokenizer = run_tokenizer(options.run_folder)
    prompt = [tokenizer.end_of_text, *(int(token) for token in tokenizer.encode(options.prompt))]
    ids: list[int] = []
    shown = ""
    sys.stdout.write(options.prompt)
    for token in generate(
        model,
        torch.tensor(prompt),
        options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=tokenizer.end_of_text,
        vocabulary=tokenizer.vocab_size,
    ):
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # a character may take several tokens
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    sys.stdout.write(tokenizer.decode(ids)[len(shown) :] + "\n")


def _add_methods(commands: Any) -> None:
    command(commands, "methods", _methods, "List the methods: the rows of the paper's table.", "scaleinv methods")


def _methods(options: argparse.Namespace) -> None:
    from scaleinv import methods

    for name in methods.names():
        row = methods.row(name)
        note = f"the {row.trained_as} model, {row.stretch} at inference" if row.stretch else ""
        kind = "infini-attention" if row.infini else row.logits
        print(f"{name:24}{row.rotary:8}{kind:18}{note}".rstrip())


COMMANDS = [_add_train, _add_prepare, _add_generate, _add_methods]
