"""What the commands share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from scaleinv import lengths, methods
from scaleinv.machine import find_device
from scaleinv.settings import Setting


class Parser(argparse.ArgumentParser):
    """A parser that raises ValueError for a mistake, so that all mistakes are shown the same way."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        for word in sys.argv[1:] if args is None else args:
            if word.startswith("--") and word.endswith("=--"):  # argparse would make an empty list of it
                self.error(f"argument {word[:-3]}: '--' is not a value")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def command(commands: Any, name: str, run: Any, summary: str, *examples: str, detail: str = "") -> Parser:
    """Add a command; ``--help`` shows the summary, the detail and the examples."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary}\n{detail}".strip(),
        epilog="\n  ".join(["example:" if len(examples) == 1 else "examples:", *examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


class Joined(argparse.Action):
    """Several words as one comma-separated text: the shell may have expanded a glob."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, ",".join(values))


def shown(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """The ``type`` of an option: argparse shows the message of ``parse``'s ValueError, not its own."""

    def parsed(word: str) -> Any:
        try:
            return parse(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def number(kind: type, **limits: float) -> Callable[[str], Any]:
    """The ``type`` of an option that is an int or a float within limits: see `scaleinv.settings.setting`."""
    return shown(Setting("", kind, **limits).parse)  # type: ignore[arg-type]


count = number(int, least=1)
"""The ``type`` of an option that is a positive integer."""

text = shown(Setting("", str).parse)
"""The ``type`` of an option that must not be empty."""


def path(word: str) -> Path:
    """The ``type`` of an option that is a path. An empty one (an unset variable) would mean the current folder."""
    return Path(text(word))


def method_names(words: str) -> list[str]:
    """The comma-separated methods that an option names; ValueError for an unknown one."""
    names = [word.strip() for word in words.split(",")]
    for name in names:
        methods.row(name)
    return names


def length_labels(words: str) -> str:
    """Context lengths such as 1x,4x,2048; ValueError for anything else."""
    lengths.parse(words, train_length=1 << 20)  # checks the form only: the training length is not known yet
    return words


def add_lengths(parser: Parser) -> None:
    """``--lengths``."""
    parser.add_argument(
        "--lengths",
        type=shown(length_labels),
        default="1x,4x,16x",
        help="context lengths, in multiples of the training length (4x) or in tokens (2048); default: 1x,4x,16x",
    )


def add_methods(parser: Parser) -> None:
    """``--methods`` that a trained model runs as."""
    parser.add_argument(
        "--methods",
        type=shown(method_names),
        help="run the model as these methods, such as rope,rope+ntk,yarn; default: its own",
    )


def device(name: str) -> str:
    """The device that a name stands for, "cpu" or "cuda" for "auto"; ValueError if it is not available."""
    return str(find_device(name))


def add_device(parser: Parser) -> None:
    """``--device``: pass it to `device` before any work."""
    parser.add_argument("--device", type=text, default="auto", help="auto, cpu or cuda; default: auto")


def add_tolerance(parser: Parser) -> None:
    """``--tolerance``: certified decoding."""
    parser.add_argument(
        "--tolerance",
        type=number(float, least=0, below=1),
        help="leave at most this share of each query's attention unread, and read only the keys that matter; "
        "default: read everything",
    )
