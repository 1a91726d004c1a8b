"""What `scaleinv generate` lets through to a terminal."""

import io
import unicodedata

import pytest
from hypothesis import given, strategies

from scaleinv.cli import generate


class Terminal(io.StringIO):
    def isatty(self):
        return True


@given(strategies.text())
def test_no_control_character_reaches_a_terminal(text):
    shown = generate.printable(text)
    assert not [c for c in shown if unicodedata.category(c) == "Cc" and c not in "\n\t"]
    assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


@given(strategies.text(strategies.characters(exclude_categories=["C"])))
def test_other_text_is_shown_as_it_is(text):
    assert generate.printable(text + "\n\t") == text + "\n\t"


@pytest.mark.parametrize(("kind", "written"), [(Terminal, "\\x1b]0;title\\x07"), (io.StringIO, "\x1b]0;title\x07")])
def test_a_pipe_gets_the_bytes_and_a_terminal_does_not(kind, written, monkeypatch):
    monkeypatch.setattr("sys.stdout", kind())
    generate.show("\x1b]0;title\x07")
    assert generate.sys.stdout.getvalue() == written
