"""The program around the commands: help, version, and what becomes of an error."""

import subprocess
import sys

import pytest
import torch

from scaleinv.cli import main, program
from scaleinv.cli.program import COMMANDS, explanation
from scaleinv.version import VERSION

NAMES = [module.__name__.rpartition(".")[2] for module in COMMANDS]


@pytest.mark.parametrize("command", NAMES)
def test_help_teaches(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert f"usage: scaleinv {command}" in printed
    assert f"  scaleinv {command}" in printed.partition("example")[2]


def test_the_help_of_the_program_lists_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert all(f"    {name}" in printed for name in NAMES)


def test_version_is_shown_without_torch():
    code = "import sys; from scaleinv.cli import main\ntry: main(['--version'])\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [f"scaleinv {VERSION}, Python {sys.version.split()[0]}", "False"]


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return caught


def torch_error(function):
    try:
        function()
    except RuntimeError as caught:
        return caught
    raise AssertionError("torch did not raise")


class CheckpointException(BaseException):
    """As in torch.distributed.checkpoint: the errors by rank, each with its stack."""

    failures = {0: (OSError(28, "No space left on device"), None)}  # noqa: RUF012


class SafetensorError(Exception):
    """As in safetensors."""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("steps must be positive"), "steps must be positive"),
        (FileNotFoundError(2, "No such file", "x"), "[Errno 2] No such file: 'x'"),
        (ImportError("needs matplotlib"), "needs matplotlib"),
        (MemoryError(), "not enough memory"),
        (RecursionError("maximum recursion depth exceeded"), "nested too deeply"),
        (OverflowError("int too large to convert to float"), "a number is too large"),
        (RuntimeError("some models failed"), "some models failed"),
        (CheckpointException(), "No space left on device"),
        (SafetensorError("header too large"), "safetensors file could not be written or read: header too large"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_the_user_can_mend_is_explained(error, line):
    assert line in explanation(raised(error))


def test_torch_out_of_memory_is_explained():
    error = torch_error(lambda: torch.empty(1 << 60, dtype=torch.uint8))
    assert explanation(error).startswith("not enough memory: ")


@pytest.mark.parametrize("error", [AssertionError("x"), KeyError("x"), TypeError("x"), NotImplementedError("x")])
def test_a_bug_keeps_its_traceback(error, monkeypatch):
    def broken(options):
        raise error

    monkeypatch.setattr(program.methods, "run", broken)
    with pytest.raises(type(error)):
        main(["methods"])


def test_a_wrong_shape_is_a_bug():
    assert explanation(torch_error(lambda: torch.ones(2) + torch.ones(3))) is None


@pytest.mark.parametrize("module", ["scaleinv.cli.program", "scaleinv.methods", "torch"])
@pytest.mark.parametrize("interrupt", ["raise KeyboardInterrupt", "os.kill(os.getpid(), 2)"])
def test_ctrl_c_during_imports_leaves_without_a_traceback(module, interrupt):
    code = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            {interrupt}
sys.meta_path.insert(0, Interrupt())
from scaleinv.cli import main
sys.exit(main(["generate", "nowhere"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_reader_that_leaves_is_no_error():
    command = f"{sys.executable} -m scaleinv methods | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
