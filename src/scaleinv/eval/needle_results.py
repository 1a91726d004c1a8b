"""Results of needles in a haystack: accuracies, their files, and one accuracy over several seeds.

``needle/<method>-seed<n>.json`` holds the result of one fine-tuned model asked as one method. The summary and the
heat-maps pool the seeds of a method.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleinv.eval.summary import SUMMARY, mapping, number, parse_accuracy, read_summary_if_any, write_summary
from scaleinv.files import UnreadableFile, read_object, write_json

DEPTHS = 10
"""Bins of the needles' depths."""
_Z95 = 1.959963984540054  # of the standard normal, two-sided 95 %

Record = dict[str, Any]
Result = dict[str, Any]
"""What a file holds: ``row`` (the method), ``seed``, ``settings`` and ``lengths``."""


def wilson(right: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % interval for a proportion.

    >>> low, high = wilson(9, 10)
    >>> f"{low:.3f} {high:.3f}"
    '0.596 0.982'
    """
    if total < 1 or not 0 <= right <= total:
        raise ValueError(f"right must lie in 0 … total, and total be positive, got {right} of {total}")
    share, z2 = right / total, _Z95**2
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z95 * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2)) / (1 + z2 / total)
    # Up to rounding, the formula gives exactly 0 and 1 at the ends.
    return (0.0 if right == 0 else middle - half), (1.0 if right == total else middle + half)


def summarize(records: Sequence[Record], depths: int = DEPTHS) -> dict[str, Any]:
    """Accuracies of samples of one length, whole and by depth."""
    tokens = sum(record["tokens"] for record in records)
    needles = [pair for record in records for pair in zip(record["depths"], record["correct"], strict=True)]
    bins: list[list[bool]] = [[] for _ in range(depths)]
    for depth, correct in needles:
        bins[min(int(depth * depths), depths - 1)].append(correct)
    return {
        "length": records[0]["length"],
        **_accuracy(sum(correct for _, correct in needles), len(needles)),
        "samples": len(records),
        "token_accuracy": sum(record["tokens_right"] for record in records) / tokens,
        "answer_loss": sum(record["loss"] * record["tokens"] for record in records) / tokens,
        "depths": [
            {"from": i / depths, "to": (i + 1) / depths, **_accuracy(sum(found), len(found)), "needles": len(found)}
            for i, found in enumerate(bins)
            if found
        ],
    }


def _accuracy(right: int, total: int) -> dict[str, float]:
    low, high = wilson(right, total)
    return {"accuracy": right / total, "low": low, "high": high}


def result_path(folder: Path, method: str, seed: int) -> Path:
    """The file of a result; the samples' records are beside it, with the suffix ``.jsonl``."""
    return folder / f"{method}-seed{seed}.json"


def save_result(folder: Path, result: Result) -> Result:
    """Write a result, keeping the lengths that the file already has if they are of the same samples; returns it.

    A damaged file is replaced: the records have every sample.
    """
    path = result_path(folder, result["row"], result["seed"])
    try:
        earlier = read_object(path)
    except UnreadableFile:
        earlier = {}
    same = all(earlier.get(name) == json.loads(json.dumps(result[name])) for name in result if name != "lengths")
    if same and isinstance(earlier.get("lengths"), dict):
        result = {**result, "lengths": {**earlier["lengths"], **result["lengths"]}}
    write_json(path, result)
    return result


def read_results(folder: Path) -> list[Result]:
    """The results in a folder by file name; ValueError names a damaged file."""
    return [check_result(read_object(path), str(path)) for path in sorted(folder.glob("*.json"))]


def check_result(data: Mapping[str, Any], where: str) -> Result:
    """A result with all that `pooled` counts; otherwise ValueError says where it is not."""
    method = data.get("method", data.get("row"))
    if not isinstance(method, str):
        raise ValueError(f"{where} must name its method, got {method!r}")
    settings = mapping(data.get("settings", {}), f"{where}: settings")
    for key, at in mapping(data.get("lengths"), f"{where}: lengths").items():
        place = f"{where}: {key}"
        number(mapping(at, place), "length", place)
        parse_accuracy(at, place)
        if not isinstance(at.get("depths"), list):
            raise ValueError(f"{place}: depths must be a list, got {at.get('depths')!r:.60}")
        for depth in at["depths"]:
            ends = tuple(number(mapping(depth, place), end, place) for end in ("from", "to"))
            if not 0 <= ends[0] < ends[1] <= 1:
                raise ValueError(f"{place}: from and to must be rising fractions of the context, got {ends}")
            parse_accuracy(depth, place)
            number(depth, "needles", place)
    return {**data, "row": method, "seed": data.get("seed", 0), "settings": dict(settings)}


def pooled(results: Sequence[Result]) -> Result:
    """One result over the seeds of a method: all their needles counted together, and the accuracy of each seed.

    Wilson's interval takes needles as independent. Those of one fine-tuned model share its luck, so with few seeds
    the interval is too narrow: ``seeds`` shows how far they lie apart.
    """
    lengths: dict[str, Any] = {}
    for key in dict.fromkeys(key for result in results for key in result["lengths"]):
        found = {result["seed"]: result["lengths"][key] for result in results if key in result["lengths"]}
        bins: dict[tuple[float, float], list[int]] = {}
        for depth in (depth for at in found.values() for depth in at["depths"]):
            count = bins.setdefault((depth["from"], depth["to"]), [0, 0])
            count[0] += round(depth["accuracy"] * depth["needles"])
            count[1] += int(depth["needles"])
        right, needles = (sum(count[i] for count in bins.values()) for i in (0, 1))
        lengths[key] = {
            "length": next(iter(found.values()))["length"],
            **_accuracy(right, needles),
            "samples": sum(at["samples"] for at in found.values()),
            "seeds": {str(seed): at["accuracy"] for seed, at in sorted(found.items())},
            "depths": [
                {"from": low, "to": high, **_accuracy(*count), "needles": count[1]}
                for (low, high), count in sorted(bins.items())
            ],
        }
    return {"row": results[0]["row"], "settings": results[0]["settings"], "lengths": lengths}


def check_folder(folder: Path, making: Iterable[tuple[str, int]], settings: Mapping[str, Any]) -> None:
    """Raise ValueError if a folder has results of another task or training: one table cannot hold both.

    Args:
        making: the methods and seeds that are about to be made; their own results may be replaced.
    """
    making, settings = set(making), json.loads(json.dumps(settings))
    advice = "results of another task or training: choose another folder"
    for path in sorted((folder / "needle").glob("*.json")):
        try:
            there = check_result(read_object(path), str(path))
        except ValueError:  # it will be made again, or named when it is reported
            continue
        if there["settings"] != settings and (there["row"], there["seed"]) not in making:
            raise ValueError(f"{path} has needle {advice}")
    summary = read_summary_if_any(folder / SUMMARY)
    others = set(summary.needle) - {method for method, _ in making}
    if others and summary.settings.get("needle") != settings:
        raise ValueError(f"{folder / SUMMARY} has needle {advice}")


def enter_in_summary(folder: Path, methods: Iterable[str], settings: Mapping[str, Any]) -> Path:
    """Put the accuracies of methods, pooled over seeds, into a folder's summary.json."""
    path, settings = folder / SUMMARY, json.loads(json.dumps(settings))
    there = [result for result in read_results(folder / "needle") if result["settings"] == settings]
    found = {}
    for method in methods:
        result = pooled([result for result in there if result["row"] == method])
        found[method] = {key: parse_accuracy(at, f"{method} at {key}") for key, at in result["lengths"].items()}
    write_summary(path, read_summary_if_any(path).with_needle(found, settings, settings["train_length"]))
    return path
