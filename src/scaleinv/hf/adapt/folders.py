"""The folder of an adaptation: what is done, and what it was done with.

adapt.json                        what the models belong to: other settings are refused
models/<variant>-seed<n>/         Hugging Face folders; variants that act at inference link to another's weights
evaluations/, curves/, summary.json
before/evaluations/, before/summary.json       the same before any training
checkpoints/                      of models that are not finished
tables/, figures/, report.html    of the report
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scaleinv import files
from scaleinv.adaptation import BASE, VARIANTS, trained_as
from scaleinv.eval.compare import error_over, over_seeds
from scaleinv.eval.loss import Evaluation, read_evaluation
from scaleinv.eval.summary import SUMMARY, Summary, read_summary_if_any, write_summary
from scaleinv.files import UnreadableFile, read_object, write_json
from scaleinv.train.validation import LengthLoss

CLAIM = "adapt.json"
CHECKPOINTS = "checkpoints"


def claim(out: Path, settings: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Note what a folder's models are made of; ValueError if it holds models of something else.

    Args:
        before: what folders were made with that do not say it, from before there was a choice.
    """
    path = out / CLAIM
    if not path.exists() and any((out / "models").glob("*")):
        raise ValueError(f"{out} holds models, but no {CLAIM} that says what they are of: choose another out")
    held = {**before, **read_object(path, "choose another out")} if path.exists() else {}
    for name, value in settings.items():
        if name in held and held[name] != value:
            raise ValueError(
                f"{path} is of an adaptation with {name}={held[name]}, but {name}={value} is asked for: "
                "choose another out"
            )
    write_json(path, {**held, **settings})


def model_folder(out: Path, name: str, seed: int) -> Path:
    return out / "models" / f"{name}-seed{seed}"


def evaluation_path(folder: Path, name: str, seed: int) -> Path:
    return folder / "evaluations" / f"{name}-seed{seed}.json"


def making(folder: Path) -> Path:
    """The name under which a folder is written until it is whole."""
    return folder.with_name(f".making-{folder.name}")


def remove_leftovers(out: Path) -> None:
    """Delete what a killed run left half written."""
    parts = ("", "evaluations", "curves", "before", "before/evaluations")
    files.remove_leftovers(*(out / part for part in parts))
    for path in (out / "models").glob(".making-*"):
        shutil.rmtree(path, ignore_errors=True)


def remove_checkpoints(out: Path) -> None:
    """Delete the checkpoints of finished models; other commands may go on from the others."""
    for path in (out / CHECKPOINTS).glob("*"):
        if (out / "models" / path.name).exists():
            shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):  # not there, or not empty
        (out / CHECKPOINTS).rmdir()


def remove_served(out: Path, trained: str, seed: int) -> None:
    """Delete what was made of an earlier model of this name: the variants that link to it, and evaluations."""
    for name in VARIANTS:
        if trained_as(name) == trained:
            evaluation_path(out, name, seed).unlink(missing_ok=True)
            shutil.rmtree(model_folder(out, name, seed), ignore_errors=True)


def link_folder(source: Path, folder: Path, save_config: Callable[[Path], object]) -> None:
    """A folder with another folder's files, as hard links where the file system has them, and a config of its own."""
    made = making(folder)
    shutil.copytree(
        source,
        made,
        ignore=lambda inside, _: {"config.json"} if Path(inside) == source else set(),
        copy_function=_link,
    )
    save_config(made)
    os.replace(made, folder)


def _link(path: str, to: str) -> None:
    try:
        os.link(path, to)
    except OSError:
        shutil.copy2(path, to)


def evaluated(folder: Path, name: str, seed: int, lengths: Mapping[str, int], tokens: int) -> Evaluation | None:
    """A variant's evaluation at all of these lengths; None if it must still be made."""
    try:
        found = read_evaluation(evaluation_path(folder, name, seed))
    except UnreadableFile:
        return None
    same = all(label in found.lengths and found.lengths[label].length == n for label, n in lengths.items())
    return found if same and found.tokens == tokens else None


def summarize(
    folder: Path, seeds: int, lengths: Mapping[str, int], tokens: int, settings: Mapping[str, Any]
) -> Summary:
    """Write summary.json from the evaluations that are there, also of earlier commands, at these lengths and tokens."""
    earlier = read_summary_if_any(folder / SUMMARY)
    seeds = max(seeds, earlier.settings.get("seeds") or 1)
    losses = {}
    for name in VARIANTS:
        by_length: dict[str, list[LengthLoss]] = {}
        for seed in range(seeds):
            found = evaluated(folder, name, seed, lengths, tokens)
            for label in lengths if found else ():
                assert found is not None
                by_length.setdefault(label, []).append(found.lengths[label])
        if by_length:
            losses[name] = over_seeds(by_length, alone=seeds == 1)
    settings = {
        **settings,
        "base": BASE if BASE in losses else None,
        "seeds": seeds,
        "stderr": error_over(seeds),
        "parameters": {**(earlier.settings.get("parameters") or {}), **settings["parameters"]},
    }
    summary = earlier.with_loss(losses, settings, asked=VARIANTS)
    write_summary(folder / SUMMARY, summary)
    return summary
