"""The command line: thin functions over the library, which is imported only by the command that needs it."""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 2 for a mistake of the user's, 128 + n after signal n."""
    try:  # around the imports too: Ctrl-C may come at any time
        from scaleinv.cli.program import run

        return run(arguments)
    except KeyboardInterrupt:
        return 130
