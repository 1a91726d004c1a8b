"""Every option of every command with nasty values: each ends in a right result, or in one line that names the option.

The options come from the parser itself, so that a new one is tried without a word here. A few values each by default,
all of them with ``pytest -m exhaustive tests/hostile``.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

import pytest
from world import TINY, assert_clear, changed, outcome, tree

from scaleinv.cli import program

pytestmark = pytest.mark.slow

VALUES = (
    "", " ", "-1", "0", "1", "-0.0", "0.5", "nan", "inf", "-inf", "1e400", "1e-400", "1_0", "٣", "0x10",
    "1099511627776", "99999999999999999999", "9" * 5000, "a\0b", "x" * 5000, "é漢\u202e", "caf\udce9", "\n", "\x1b[31m",
    "-", "'",
    "%s", "{}", "*", "[", "~", ",", ",,", "1x,", "none", "None", "true", "all", "rope,rope", "run", "run.toml", "books",
    "nowhere/at/all", "pipe", "/dev/null", "/dev/full", "loop", "run.toml/below", "bpe:", "bpe:99999999",
    "hf:", "hf:a/b/c/d",
)  # fmt: skip
"""Texts for any option; pipe is a FIFO and loop a link to itself."""

USUAL = {
    "train": f"{TINY} --steps 1 --data books --out new",
    "evaluate": "run --lengths 1x --tokens 384",
    "compare": f"{TINY} --steps 1 --data books --out new --methods rope --seeds 1 --tokens 96 --lengths 1x --no-report",
    "adapt": "llama --data books --out new --variants stock --tokens 96 --batch-tokens 96 --train-length 32 "
    "--val-tokens 96 --lengths 1x --no-report --device cpu",
    "needle": "run --lengths 1x --samples 1 --needles 1 --digits 1 --cities 3 --steps 1 --out new",
    "generate": "run --tokens 2",
    "report": "results",
    "analyze": "theory --out new",
    "prepare": "--text books --tokenizer bytes --workers 1 --out new",
    "convert": "run --out new",
    "export": "run --out new",
    "methods": "",
    "doctor": "--device cpu",
}
"""What each command needs, and what makes it quick."""
HEAVY = ("report", "analyze", "convert", "export", "doctor")
"""Commands that take seconds if their options are good."""
LONG = ("--steps", "--samples", "--seeds", "--layers", "--width", "--workers")
"""Options that a large number makes much work of."""


@dataclass(frozen=True)
class Option:
    """An option of a command, or a positional argument where ``flag`` is empty."""

    command: str
    flag: str
    name: str
    metavar: str

    def __str__(self) -> str:
        return f"{self.command}{self.flag or '-' + self.name}"


def options() -> list[Option]:
    """All that take a value."""
    (commands,) = (action for action in program.parser()._actions if isinstance(action, argparse._SubParsersAction))
    return [
        Option(command, action.option_strings[-1] if action.option_strings else "", action.dest, str(action.metavar))
        for command, parser in commands.choices.items()
        for action in parser._actions
        if action.nargs != 0
    ]


OPTIONS = options()


def words(option: Option, value: str) -> list[str]:
    """A whole command line with the value in its place."""
    usual = USUAL[option.command].split()
    if not option.flag:
        before = ["model"] if option.name == "path" else []
        return [option.command, *usual[1:], "--", *before, value]
    # With `=`, a value that begins with a dash is no option.
    return [option.command, *usual, f"{option.flag}={value}"]


def try_value(world, option: Option, value: str) -> None:
    world.reset()
    os.mkfifo("pipe")
    os.symlink("loop", "loop")
    before = tree(world.here)
    found = outcome(words(option, value))
    shown = value.strip()[:20].encode("utf-8", "backslashreplace").decode()
    assert_clear(
        found,
        "training length",
        option.flag or option.metavar,
        option.name,
        option.name.removesuffix("_folder"),
        shown.partition(",")[0] or shown,
        repr(shown)[1:-1],
    )
    touched = changed(before, tree(world.here))
    if found.code == 2:
        assert not {name for name in touched if not name.startswith("cache/")}
    else:
        assert not {
            name for name in touched & before.keys() if name.startswith(("books", "bpe", "shards", "pipe", "run."))
        }


def check(world, option: Option, values) -> None:
    for value in values:
        if value == "1099511627776" and (option.flag in LONG or str(option) == "adapt--tokens"):
            continue  # as much work as was asked for
        try:
            try_value(world, option, value)
        except BaseException as error:
            error.add_note(f"{option}={value[:60]!r}")
            raise


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.command not in HEAVY], ids=str)
def test_some_values(option, world):
    first = OPTIONS.index(option) * 3 % len(VALUES)
    check(world, option, (VALUES + VALUES)[first : first + 3])


@pytest.mark.exhaustive
@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_all_values(option, world):
    check(world, option, VALUES)
