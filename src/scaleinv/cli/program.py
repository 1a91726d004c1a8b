"""The program: its commands, and a mistake as one line."""

from __future__ import annotations

import dis
import logging
import os
import platform
import sys
from collections.abc import Sequence

from scaleinv.cli import (
    adapt,
    analyze,
    compare,
    convert,
    doctor,
    evaluate,
    export,
    generate,
    methods,
    needle,
    prepare,
    report,
    train,
)
from scaleinv.cli.common import Parser
from scaleinv.machine import is_about_memory
from scaleinv.version import VERSION

COMMANDS = (
    train,
    evaluate,
    compare,
    needle,
    generate,
    report,
    analyze,
    prepare,
    convert,
    adapt,
    export,
    methods,
    doctor,
)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code; a user's mistake is one line on stderr."""
    if hasattr(sys.stdout, "reconfigure"):  # a terminal that cannot show a × shows \xd7
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        options = parser().parse_args(arguments)
        logging.basicConfig(format="%(message)s", stream=sys.stderr)
        logging.getLogger("scaleinv").setLevel(logging.INFO)
        return options.run(options) or 0
    except BrokenPipeError:  # the reader has left, and Python must not write to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch.distributed.checkpoint's CheckpointException is not an Exception
        line = explanation(error)
        if line is None:
            raise
        print("scaleinv: error:", " ".join(line.split()), file=sys.stderr)
        return 2


def parser() -> Parser:
    """All commands and their options."""
    found = Parser(
        prog="scaleinv",
        description="Scale-invariant attention: train on short contexts, run on long ones (arXiv 2505.17083).",
        epilog="`scaleinv COMMAND --help` explains a command.",
    )
    version = f"scaleinv {VERSION}, Python {platform.python_version()}"
    found.add_argument("--version", action="version", version=version, help="show the version and exit")
    commands = found.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.add(commands)
    return found


def explanation(error: BaseException) -> str | None:
    """What to tell the user about an error; None for a bug in the program, which deserves its traceback."""
    text = str(error)
    name = type(error).__name__
    if is_about_memory(error):
        return f"not enough memory: {text}" if text else "not enough memory"
    if isinstance(error, RecursionError):
        return f"the input is nested too deeply: {text}"
    if isinstance(error, OverflowError):
        return f"a number is too large: {text}"
    if name == "CheckpointException":
        causes = [cause for cause, *_ in getattr(error, "failures", {}).values()]
        return f"a checkpoint could not be written or read: {causes[0] if causes else text}"
    if name == "SafetensorError":
        return f"a .safetensors file could not be written or read: {text}"
    if isinstance(error, (ValueError, OSError, ImportError)):
        return text or name
    if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
        return text or name if type(error) is not RuntimeError or _raised_in_python(error) else None
    return None


def _raised_in_python(error: BaseException) -> bool:
    """Was it raised by a ``raise`` in Python, for the user to read? An error inside a tensor operation was not."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
