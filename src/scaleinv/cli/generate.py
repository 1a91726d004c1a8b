"""`scaleinv generate`: text from a trained model."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from scaleinv import methods
from scaleinv.cli.common import add_device, add_tolerance, command, device, number, path, text

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters except newline and tab, and characters that change the direction of text."""


def add(commands: Any) -> None:
    parser = command(
        commands,
        "generate",
        run,
        "Generate text with a trained model, shown as it is made.",
        'scaleinv generate runs/si --prompt "def main("',
        detail="On a terminal, control characters are shown escaped (\\x1b); a file or a pipe gets the text unchanged.",
    )
    option = parser.add_argument
    option("run_folder", metavar="RUN", type=path, help="a run's folder")
    option("--prompt", default="", help="what the text begins with; default: a new document")
    option("--tokens", type=number(int, least=0), default=300, help="write at most this many tokens; default: 300")
    option(
        "--temperature",
        type=number(float, least=0),
        default=0.8,
        help="0 takes the likeliest token each time; default: 0.8",
    )
    option("--top-k", type=number(int, least=1), help="choose among the k likeliest tokens; default: all")
    option(
        "--top-p",
        type=number(float, above=0, most=1),
        help="choose among the likeliest tokens that make up this probability; default: 1",
    )
    option("--seed", type=number(int, least=0), help="seed of the sampling; default: another text each time")
    option("--method", type=text, help="run a RoPE-trained model as rope+ntk or yarn; default: its own")
    add_tolerance(parser)
    add_device(parser)


def run(options: argparse.Namespace) -> None:
    if options.method:
        methods.row(options.method)
    where = device(options.device)

    import torch

    from scaleinv.eval import generate
    from scaleinv.train.store import load_model, run_tokenizer

    model, _ = load_model(options.run_folder, where)
    if options.method:
        model.use_method(options.method)
    tokenizer = run_tokenizer(options.run_folder)
    prompt = [tokenizer.end_of_text, *(int(token) for token in tokenizer.encode(options.prompt))]
    tokens = generate(
        model,
        torch.tensor(prompt),
        options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=tokenizer.end_of_text,
        vocabulary=tokenizer.vocab_size,
        tolerance=options.tolerance,
    )
    show(options.prompt)
    ids: list[int] = []
    shown = ""
    for token in tokens:
        ids.append(token)
        decoded = tokenizer.decode(ids)
        if not decoded.endswith("\ufffd"):  # a character may take several tokens
            show(decoded[len(shown) :])
            shown = decoded
    show(tokenizer.decode(ids)[len(shown) :] + "\n")


def show(text: str) -> None:
    """Write text at once; a terminal gets no control characters, since they could move its cursor or set its title."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def printable(text: str) -> str:
    r"""The text with control characters escaped.

    >>> printable("red: \x1b[31m\n")
    'red: \\x1b[31m\n'
    """
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
