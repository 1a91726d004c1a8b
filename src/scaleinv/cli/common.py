"""What the commands share."""

from __future__ import annotations

import argparse
from typing import Any

Parser = argparse.ArgumentParser


def command(commands: Any, name: str, run: Any, summary: str, example: str) -> Parser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


class Joined(argparse.Action):
    """Several words as one comma-separated list: the shell may have spread a glob."""

    def __call__(self, parser: Parser, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, ",".join(values))
