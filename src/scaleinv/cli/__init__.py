"""The command line: thin functions over the library, which is imported only by the command that needs it."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from scaleinv.cli import (
    analyze,
    compare,
    convert,
    evaluate,
    export,
    generate,
    methods,
    needle,
    prepare,
    report,
    train,
)

COMMANDS = (train, prepare, generate, methods, evaluate, compare, report, needle, analyze, convert, export)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 2 for a mistake of the user's, 128 + n after signal n."""
    parser = argparse.ArgumentParser(
        prog="scaleinv",
        description="Scale-invariant attention: train on short contexts, run on long ones (arXiv 2505.17083).",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.add(commands)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return options.run(options) or 0
    except BrokenPipeError:  # the reader has left; nor may Python write to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        print(f"scaleinv: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
