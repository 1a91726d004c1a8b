"""The command line: thin functions over the library, which is imported only by the command that needs it."""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from types import FrameType


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0, 2 for a user's mistake, or 128 + n after signal n."""
    try:  # around the imports too: Ctrl-C may come at any time
        with _interrupts():
            from scaleinv.cli.program import run

            return run(arguments)
    except KeyboardInterrupt:
        return 130


@contextlib.contextmanager
def _interrupts() -> Iterator[None]:
    """Ctrl-C leaves at once where modules are being imported, and is a KeyboardInterrupt elsewhere."""
    usual = signal.default_int_handler
    try:
        if signal.getsignal(signal.SIGINT) is usual:
            signal.signal(signal.SIGINT, _interrupt)
    except ValueError:  # not the main thread: no signal arrives here
        pass
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _interrupt:
            signal.signal(signal.SIGINT, usual)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Torch and numpy abort, or raise something else, where an exception interrupts their import."""
    inner = frame
    while inner is not None:
        if inner.f_code.co_filename == "<frozen importlib._bootstrap>":
            os._exit(130)
        inner = inner.f_back
    signal.default_int_handler(number, frame)
