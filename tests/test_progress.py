import io
import json

import pytest

from scaleinv import progress
from scaleinv.progress import Report, Terminal, clock


class Screen(io.StringIO):
    def __init__(self, tty: bool) -> None:
        super().__init__()
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty


def steps(count: int) -> list[str]:
    return [Report(f"step {n}", passing=True, kind="step", step=n) for n in range(1, count + 1)]


def test_a_report_is_text_and_data():
    line = Report("step 3", kind="step", step=3)
    assert line == "step 3"
    assert json.loads(json.dumps(line.record)) == {"kind": "step", "step": 3}


def test_passing_lines_replace_each_other_on_a_terminal(monkeypatch):
    screen = Screen(tty=True)
    monkeypatch.setattr("sys.stdout", screen)
    show = Terminal(every=1000)
    for line in [*steps(2), "done"]:
        show(line)
    assert screen.getvalue() == "\r\033[Kstep 1\r\033[Kstep 2\r\033[Kdone\n"


def test_a_passing_line_fits_the_terminal(monkeypatch):
    screen = Screen(tty=True)
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", "5")
    Terminal()(Report("0123456789", passing=True, kind="step"))
    Terminal()("0123456789")
    assert screen.getvalue() == "\r\033[K0123\r\033[K0123456789\n"


@pytest.mark.parametrize(("every", "shown"), [(0, [1, 2, 3, 4]), (2, [1, 3])])
def test_a_file_gets_plain_lines_at_a_rate(monkeypatch, every, shown):
    screen = Screen(tty=False)
    now = iter([0, 0, 1, 2, 2, 3] if every else range(100))
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    show = Terminal(every)
    for line in [*steps(4), "done"]:
        show(line)
    assert screen.getvalue().splitlines() == [*(f"step {n}" for n in shown), "done"]


def test_clock():
    assert [clock(seconds) for seconds in (5, 65, 3723)] == ["0:05", "1:05", "1:02:03"]
