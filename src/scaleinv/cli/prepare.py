"""`scaleinv prepare`: text to token shards."""

from __future__ import annotations

import argparse
from typing import Any

from scaleinv.cli.common import Joined, command, count, number, path, text


def add(commands: Any) -> None:
    parser = command(
        commands,
        "prepare",
        run,
        "Turn text into .bin token shards, in parallel.",
        "scaleinv prepare --text path/to/books --tokenizer gpt2 --out shards/",
    )
    option = parser.add_argument
    option(
        "--text",
        required=True,
        type=text,
        nargs="+",
        action=Joined,
        help="files, a folder, a glob, or the name of a corpus",
    )
    option("--tokenizer", type=text, default="gpt2", help="bytes, gpt2, bpe, bpe:SIZE or a folder; default: gpt2")
    option("--out", required=True, type=path, help="an empty or new folder")
    option("--shard-tokens", type=count, default=100_000_000, help="tokens per shard; default: 100 million")
    option("--workers", type=count, help="processes; default: one per core")
    option(
        "--val-fraction",
        type=number(float, least=0, below=1),
        default=0.01,
        help="share of the documents held out; default: 0.01",
    )


def run(options: argparse.Namespace) -> None:
    from scaleinv.data import prepare
    from scaleinv.progress import terminal

    written = prepare(
        options.text,
        options.tokenizer,
        options.out,
        shard_tokens=options.shard_tokens,
        workers=options.workers,
        progress=terminal,
        val_fraction=options.val_fraction,
    )
    for file in written:
        print(file)
