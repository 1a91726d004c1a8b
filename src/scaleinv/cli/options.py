"""Options of the command line and keys of a file, both derived from settings, so that each is defined once."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaleinv.cli.common import Joined, Parser, path, shown
from scaleinv.files import UnreadableFile, read_object
from scaleinv.model.config import PRESETS, GPTConfig
from scaleinv.settings import Setting, settings
from scaleinv.train.config import TrainConfig, preset

RUN: dict[str, Setting] = {
    "preset": Setting(
        "preset",
        str,
        default="mini",
        choices=tuple(PRESETS),
        help="settings to start from: mini takes minutes on a CPU, small half an hour; 162m and 304m are the paper's",
    ),
    **settings(GPTConfig),
    **settings(TrainConfig),
}
"""Every setting of a training run."""


def add_options(parser: Parser, known: Mapping[str, Setting], defaults: Mapping[str, str]) -> None:
    """Add an option for each setting, under the heading of its group, and ``--config`` for a file of them.

    Args:
        defaults: what ``--help`` shows as a default, if it is not the setting's own.
    """
    parser.usage = "%(prog)s [OPTION ...]"
    parser.add_argument(
        "--config", type=path, metavar="FILE", help="settings from FILE: run.toml, or a run's config.json"
    )
    groups: dict[str, Any] = {"": parser}
    for setting in known.values():
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group)
        _add(groups[setting.group], setting, defaults.get(setting.name) or default_text(setting))


def given(options: argparse.Namespace, known: Mapping[str, Setting]) -> dict[str, Any]:
    """The settings that the user gave: those of the file, overridden by those of the command line."""
    chosen = {name: getattr(options, name) for name in known if getattr(options, name) is not None}
    return {**(read_file(options.config, known) if options.config else {}), **chosen}


def read_file(file: Path, known: Mapping[str, Setting]) -> dict[str, Any]:
    """The settings in a TOML file (``lr-matrices = 0.01``) or a run's config.json; ValueError names a wrong file."""
    if not file.is_file():
        raise UnreadableFile(file, "is not a file")
    found = _run_settings(file, known) if file.suffix == ".json" else _toml(file)
    values = {}
    for key, content in found.items():
        name = key.replace("-", "_")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f": did you mean {_flag(close[0])[2:]}?" if close else ""
            raise UnreadableFile(file, f"has an unknown key {key!r}{hint}")
        setting = known[name]
        if setting.several and isinstance(content, list) and all(isinstance(item, str) for item in content):
            content = ",".join(content)
        try:
            values[name] = setting.read(content)
        except ValueError as error:
            raise UnreadableFile(file, f"is wrong: {key} {error}") from None
    return values


def default_text(setting: Setting) -> str:
    """A default in words: the setting's own, or "the preset's" where presets differ."""
    default = setting.default
    if setting is RUN.get(setting.name) and setting.name != "preset":
        values = [usual[setting.name] for usual in _presets()]
        if any(other != values[0] for other in values):
            return "the preset's"
        default = values[0]
    if default is None:
        return setting.unset
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ",".join(f"{item:g}" for item in default)
    return f"{default:,}" if isinstance(default, int) else f"{default:g}" if isinstance(default, float) else default


@functools.cache
def _presets() -> list[dict[str, Any]]:
    """The settings of each preset."""
    return [_flat(dataclasses.asdict(preset(name))) for name in PRESETS]


def _flat(run: Mapping[str, Any]) -> dict[str, Any]:
    return {**{name: content for name, content in run.items() if name != "model"}, **run["model"]}


def _add(parser: Any, setting: Setting, default: str) -> None:
    words = f"{setting.help}; default: {default}" if default else setting.help
    options: dict[str, Any] = {"help": words.replace("%", "%%"), "dest": setting.name}
    if setting.kind is bool:
        parser.add_argument(_flag(setting.name), action=argparse.BooleanOptionalAction, default=None, **options)
        return
    options["metavar"] = setting.metavar or _metavar(setting)
    if setting.several:
        options |= {"nargs": "+", "action": Joined}
    parser.add_argument(_flag(setting.name), type=shown(setting.parse), **options)


def _metavar(setting: Setting) -> str:
    if setting.choices:
        return "{" + ",".join(setting.choices) + "}"
    word = {int: "N", float: "X", str: "TEXT"}[setting.kind]
    return word if setting.items is None else f"{word},{word}" if setting.items == 2 else f"{word},…"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _toml(file: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnreadableFile(file, f"cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(file, f"is not TOML: {error}") from error


def _run_settings(file: Path, known: Mapping[str, Setting]) -> dict[str, Any]:
    """A run's known settings except its folder; those that are None are left out, because None is the default."""
    try:
        run = TrainConfig.from_json(read_object(file)["train"])
    except UnreadableFile:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableFile(file, f"is not a run's config.json: {error!r:.200}") from error
    values = _flat(run.to_json())
    return {name: values[name] for name in known if name != "out" and values.get(name) is not None}
