"""Settings: fields of a configuration that know their help, type and range.

A configuration is a dataclass of plain values. Its fields are made with `setting`, checked by `check`, and turned into
command-line options and keys of a file by `scaleinv.cli.options`, so each is defined once.

>>> @dataclasses.dataclass
... class Oven:
...     degrees: int = setting(180, "temperature in °C", least=1, most=300)
...     fan: bool = setting(False, "blow the air around")
>>> settings(Oven)["degrees"].parse("200")
200
>>> check(Oven(degrees=0))
Traceback (most recent call last):
ValueError: degrees must be an integer from 1 to 300, got 0
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from typing import Any, TypeVar

_T = TypeVar("_T")
_LARGEST = 2**63 - 1  # what torch and numpy take for an integer


def setting(
    default: _T,
    help: str,
    *,
    unset: str = "",
    group: str = "",
    metavar: str | None = None,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    several: bool = False,
    resume: bool = False,
) -> _T:
    """A field of a configuration.

    Args:
        help: what it means, in a few words that begin in lower case.
        unset: what a default of None stands for: "no clipping".
        group: its heading in ``--help``.
        metavar: stands for the value in ``--help``; derived from the type otherwise.
        least: the smallest value; ``above`` leaves that value out.
        most: the largest value; ``below`` leaves that value out.
        several: the option takes several words and joins them with commas.
        resume: it may change when a run is resumed.
    """
    known = dict(locals())
    del known["default"]
    return dataclasses.field(default=default, metadata={"setting": known})


@dataclasses.dataclass(frozen=True)
class Setting:
    """A field's name, type, range and help."""

    name: str
    kind: type
    """int, float, bool or str: of the value, or of the items of a tuple."""
    default: Any = None
    optional: bool = False
    """Whether None is allowed."""
    choices: tuple[str, ...] = ()
    """The values of a Literal; empty if any value is allowed."""
    items: int | None = None
    """How many values a tuple has, 0 for one or more; None for a single value."""
    help: str = ""
    unset: str = ""
    group: str = ""
    metavar: str | None = None
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    several: bool = False
    resume: bool = False

    def parse(self, text: str) -> Any:
        """The value that a text stands for; otherwise ValueError says what it must be."""
        if self.kind in (str, bool):
            return self.read(text)
        words = text.split(",") if self.items is not None else [text]
        try:
            values = [self.kind(word) for word in words]
        except ValueError:
            raise ValueError(f"must be {self.wanted()}, got {text!r:.80}") from None
        return self.read(values if self.items is not None else values[0])

    def read(self, value: Any) -> Any:
        """The value if it is valid, with lists made into tuples; otherwise ValueError says what it must be."""
        if value is None and self.optional:
            return None
        if self.items is None:
            good = self._fits(value)
        else:
            value = tuple(value) if isinstance(value, list) else value
            good = isinstance(value, tuple) and len(value) > 0 and self.items in (0, len(value))
            good = good and all(self._fits(item) for item in value)
        if not good:
            raise ValueError(f"must be {self.wanted()}, got {value!r:.80}")
        return value

    def wanted(self) -> str:
        """What a value must be: "a positive integer"."""
        if self.kind is bool:
            return "true or false"
        if self.choices:
            return " or ".join(map(repr, self.choices))
        if self.kind is str:
            return "text that is not empty, in UTF-8 and without NUL"
        if self.items is not None:
            return f"{self.items or 'one or more'} {'integers' if self.kind is int else 'numbers'}{self._range()}"
        if self.kind is int:
            if self.least == 1 and self.most is None:
                return "a positive integer"
            return f"an integer{self._range()}"
        if self.least is None and self.most is None and self.below is None:
            return "positive and finite" if self.above == 0 else "finite"
        if self.least == 0 and self.most is None and self.below is None:
            return "finite and not negative"
        return f"a number{self._range()}"

    def _range(self) -> str:
        low = self.least if self.above is None else self.above
        high = self.most if self.below is None else self.below
        if low is None and high is None:
            return ""
        if high is None:
            return f" {'of at least' if self.above is None else 'above'} {low:,}"
        if low is None:
            return f" {'of at most' if self.below is None else 'below'} {high:,}"
        edge = "" if self.above is None else f", {low:,} excluded"
        edge += "" if self.below is None else f", {high:,} excluded"
        return f" from {low:,} to {high:,}{edge}"

    def _fits(self, value: Any) -> bool:
        if self.kind is bool:
            return isinstance(value, bool)
        if self.kind is str:
            return isinstance(value, str) and _is_text(value) and (not self.choices or value in self.choices)
        if isinstance(value, bool) or not isinstance(value, (int,) if self.kind is int else (int, float)):
            return False
        if isinstance(value, int) and abs(value) > _LARGEST:
            return False
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )


def _is_text(value: str) -> bool:
    """Whether a text can be a path, and be kept as JSON: bytes that are not UTF-8 come as lone surrogates."""
    return bool(value.strip()) and "\0" not in value and not any("\ud800" <= x <= "\udfff" for x in value)


@functools.cache
def settings(config: Any) -> dict[str, Setting]:
    """The settings of a configuration (a class) by name, in the order of its fields."""
    hints = typing.get_type_hints(config)
    found = {}
    for field in dataclasses.fields(config):
        if "setting" in field.metadata:
            shape = _shape(hints[field.name])
            found[field.name] = Setting(field.name, default=field.default, **shape, **field.metadata["setting"])
    return found


def check(config: Any) -> None:
    """Raise ValueError that names the first setting of a configuration that is not valid."""
    kind: Any = type(config)
    for name, one in settings(kind).items():
        try:
            one.read(getattr(config, name))
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None


def _shape(hint: Any) -> dict[str, Any]:
    """What a type hint says: ``int``, ``float | None``, ``Literal["a", "b"]`` or ``tuple[int, ...]``."""
    optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
        optional = True
    choices: tuple[str, ...] = ()
    items = None
    if typing.get_origin(hint) is typing.Literal:
        hint, choices = str, typing.get_args(hint)
    elif typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        hint, items = parts[0], 0 if parts[-1] is ... else len(parts)
    assert hint in (int, float, bool, str), f"a setting cannot be a {hint}"
    return {"kind": hint, "optional": optional, "choices": choices, "items": items}
