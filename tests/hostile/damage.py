"""Damage to files: drawn by Hypothesis, or from a list that is always tried."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

VALUES = (
    None, True, False, 0, -1, 1.5, 7, 2**40, 10**30, -(10**30), math.nan, math.inf, -math.inf, 1e308, 1e-320,
    "", " ", "x", "a\0b", "\ud800", "nan", "../../..", "/dev/zero", "é" * 300, [], {}, [[]], [None], [1, "x"],
    {"": None}, {"a": {"b": []}}, [1e308] * 3,
)  # fmt: skip
"""What a value is replaced with: other types, and numbers and texts at the edge of what can be."""


@dataclass(frozen=True)
class Damage:
    """Damage with words for it; ``key`` is the last name on the way to a value that was changed."""

    words: str
    do: Callable[[Path], None]
    key: str = ""

    def __repr__(self) -> str:
        return self.words


def rewrite(words: str, content: bytes) -> Damage:
    return Damage(words, lambda path: path.write_bytes(content))


def _special(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def do(path: Path) -> None:
        path.unlink()
        make(path)

    return do


EDGES = (
    rewrite("empty", b""),
    rewrite("a space", b" "),
    rewrite("NUL bytes", bytes(64)),
    rewrite("not UTF-8", b"\xff\xfe{}"),
    rewrite("a byte order mark", b"\xef\xbb\xbf{}"),
    rewrite("null", b"null\n"),
    rewrite("a list", b"[]\n"),
    rewrite("an empty object", b"{}\n"),
    rewrite("a number of 5,000 digits", b'{"step": ' + b"9" * 5000 + b"}\n"),
    rewrite("nested 100,000 deep", b"[" * 100_000),
    rewrite("objects nested 100,000 deep", b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"\n"),
    Damage("missing", lambda path: path.unlink()),
    Damage("a folder", _special(Path.mkdir)),
    Damage("a pipe", _special(os.mkfifo)),
    Damage("a link to itself", _special(lambda path: path.symlink_to(path.name))),
    Damage("a link to nothing", _special(lambda path: path.symlink_to("nowhere"))),
    Damage("a link to /dev/zero", _special(lambda path: path.symlink_to("/dev/zero"))),
)
"""What is tried with every file."""


@st.composite
def raw(draw: st.DrawFn) -> Damage:
    """A cut, a flipped bit, bytes put in or overwritten: at a place between 0 and 1."""
    place = draw(st.floats(0, 1, exclude_max=True))
    kind = draw(st.sampled_from(["cut", "flip", "insert", "overwrite", "repeat"]))
    bit, filling = draw(st.integers(0, 7)), draw(st.binary(min_size=1, max_size=12))

    def do(path: Path) -> None:
        content = bytearray(path.read_bytes())
        at = int(place * len(content))
        if kind == "cut":
            del content[at:]
        elif kind == "flip":
            content[at] ^= 1 << bit
        elif kind == "insert":
            content[at:at] = filling
        elif kind == "overwrite":
            content[at : at + len(filling)] = filling
        else:
            content += content[at:]
        path.write_bytes(bytes(content))

    detail = {"flip": f" bit {bit}", "insert": f" {filling!r}", "overwrite": f" {filling!r}"}.get(kind, "")
    return Damage(f"{kind}{detail} at {place:.6g}", do)


@st.composite
def values(draw: st.DrawFn, document: Any, lines: bool = False) -> Damage:
    """A value of a JSON document replaced or left out, anywhere in it."""
    places = sorted(_places(document), key=repr)
    place = draw(st.sampled_from(places))
    drop = draw(st.booleans()) if draw(st.integers(0, 3)) == 0 else False
    value = None if drop else draw(st.sampled_from(VALUES))

    def do(path: Path) -> None:
        changed = json.loads(json.dumps(document))
        inner = changed
        for step in place[:-1]:
            inner = inner[step]
        if drop:
            del inner[place[-1]]
        else:
            inner[place[-1]] = value
        texts = [json.dumps(line) for line in changed] if lines else [json.dumps(changed, indent=1)]
        path.write_text("\n".join(texts) + "\n")

    key = next((str(step) for step in reversed(place) if isinstance(step, str)), "")
    where = ".".join(map(str, place))
    return Damage(f"{where} left out" if drop else f"{where} = {value!r:.60}", do, key)


def _places(document: Any, way: tuple = ()) -> list[tuple]:
    """The ways to all values inside a document; of a long list the first and the last two."""
    if isinstance(document, dict):
        items = list(document.items())
    elif isinstance(document, list):
        items = list(enumerate(document))
        items = items[:2] + items[2:][-2:]
    else:
        return []
    return [place for key, inner in items for place in [(*way, key), *_places(inner, (*way, key))]]


def damages(path: Path) -> st.SearchStrategy[Damage]:
    """Damage that suits a file: of its bytes, and of its values if it holds JSON."""
    if path.suffix == ".json":
        return st.one_of(raw(), *[values(json.loads(path.read_text()))] * 3)
    if path.suffix == ".jsonl":
        return st.one_of(raw(), *[values([json.loads(line) for line in path.read_text().splitlines()], True)] * 2)
    return raw()
