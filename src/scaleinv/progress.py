"""Progress: what long work tells its caller while it runs.

A slow function has an argument ``progress``, a callback for lines of text. Some lines are a `Report`: text that also
carries its content as data, for a caller that is a program.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

Progress = Callable[[str], None]


class Report(str):
    """A line of progress that also carries its content as data.

    >>> line = Report("step 3/9  loss 1.5", kind="step", step=3, steps=9, loss=1.5)
    >>> line.record["step"], line.passing
    (3, False)

    Args:
        passing: the next line replaces this one on a terminal.
        kind: what the record is: "step", "validation", "windows" …
    """

    passing: bool
    record: dict[str, Any]

    def __new__(cls, text: str, *, passing: bool = False, kind: str, **values: Any) -> Report:
        line = super().__new__(cls, text)
        line.passing = passing
        line.record = {"kind": kind, **values}
        return line


def silent(line: str) -> None:
    """Progress that nobody wants to see."""


class Terminal:
    """Prints progress: on a terminal, passing lines replace each other; in a file, they are ordinary lines.

    Args:
        every: seconds between passing lines in a file; any that come sooner are left out.
    """

    def __init__(self, every: float = 0.0) -> None:
        self.every = every
        self.last = float("-inf")

    def __call__(self, line: str) -> None:
        passing = isinstance(line, Report) and line.passing
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 1  # a longer line would wrap and could not be replaced
            sys.stdout.write(f"\r\033[K{line[:width]}" if passing else f"\r\033[K{line}\n")
        elif not passing:
            sys.stdout.write(f"{line}\n")
        elif time.monotonic() - self.last >= self.every:
            self.last = time.monotonic()
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


terminal = Terminal()


def clock(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
