"""Needle in a haystack (arXiv 2505.17083): fine-tune a run on the task, then ask it at any length and depth.

`run_needle` does all of it, and resumes if interrupted; `evaluate` is the second half, for any model. The task is in
`needle_task`, fine-tuning in `needle_train`, decoding in `needle_decode`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleinv.data import TokenData, Tokenizer
from scaleinv.eval.needle_decode import read_samples
from scaleinv.eval.needle_task import NeedleTask, make_sample
from scaleinv.eval.needle_train import NeedleTraining, finetune
from scaleinv.eval.summary import SUMMARY, parse_accuracy, read_summary_if_any, write_summary
from scaleinv.files import UnreadableFile, read_lines, read_object, write_json, write_text
from scaleinv.lengths import parse
from scaleinv.machine import find_device
from scaleinv.methods import trained_as
from scaleinv.model import GPT, PRESETS, GPTConfig
from scaleinv.progress import Progress, Report, silent
from scaleinv.train import store
from scaleinv.train.passes import precision

SAMPLES = 100
"""Samples per length."""
DEPTHS = 10
"""Bins of the needles' depths."""
_Z95 = 1.959963984540054  # of the standard normal, two-sided 95 %

Record = dict[str, Any]
RECORD = {"length", "index", "depths", "answer", "text", "correct", "tokens", "tokens_right", "loss"}
"""What a record of a sample holds."""


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


def evaluate(
    model: GPT,
    data: TokenData,
    tokenizer: Tokenizer,
    task: NeedleTask,
    lengths: Mapping[str, int],
    *,
    samples: int = SAMPLES,
    seed: int = 0,
    records: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    batch_tokens: int = 16_384,
    depths: int = DEPTHS,
    tolerance: float | None = None,
    progress: Progress = silent,
) -> dict[str, dict[str, Any]]:
    """Accuracy by length and depth: ``{"1x": {"accuracy", "low", "high", "depths", …}, …}``.

    Accuracy is over needles: a needle is right if the greedy answer has its city and its number. Low and high are
    Wilson's 95 % interval. ``token_accuracy`` and ``answer_loss`` (nats per token) are of the right answer,
    teacher-forced.

    Args:
        data: held-out text for the haystacks.
        lengths: tokens in a sample, by label.
        samples: at each length.
        records: a JSON Lines file, one line per sample; samples that it already has are not asked again.
        settings: what the records depend on besides the task and the seed; a file with other settings is refused.
        batch_tokens: tokens read at a time, unless a single sample is longer.
        depths: bins of equal size; those without a needle are left out.
        tolerance: answer with a `scaleinv.CertifiedCache`; None for exact attention.
        progress: takes lines of text.
    """
    _check_counts(samples=samples, batch_tokens=batch_tokens, depths=depths)
    if not lengths:
        raise ValueError("lengths must name at least one length, got none")
    settings = {**(settings or {}), **({} if tolerance is None else {"tolerance": tolerance})}
    done = _open_records(records, _head(task, seed, settings)) if records is not None else {}
    was_training = model.training
    model.eval()
    results = {}
    for label, length in lengths.items():
        sized = task.at(length)
        batch = max(1, batch_tokens // length)
        for start in range(0, samples, batch):
            missing = [i for i in range(start, min(start + batch, samples)) if (length, i) not in done]
            if missing:
                made = _ask(model, data, tokenizer, sized, seed, missing, tolerance)
                done.update({(length, record["index"]): record for record in made})
                if records is not None:
                    with records.open("a") as file:
                        file.write("".join(json.dumps(record) + "\n" for record in made))
            asked = min(start + batch, samples)
            text = f"needle at {label}: {asked}/{samples} samples"
            progress(Report(text, passing=True, kind="samples", length=label, done=asked, total=samples))
        results[label] = summarize([done[length, index] for index in range(samples)], depths)
    model.train(was_training)
    return results


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _ask(
    model: GPT,
    data: TokenData,
    tokenizer: Tokenizer,
    task: NeedleTask,
    seed: int,
    indices: Sequence[int],
    tolerance: float | None,
) -> list[Record]:
    chosen = [make_sample(task, data, tokenizer, seed=seed, index=index) for index in indices]
    with precision(next(model.parameters()).device):
        readings = read_samples(model, chosen, task, tokenizer, tolerance)
    return [
        {
            "length": task.length,
            "index": sample.index,
            "depths": [needle.depth for needle in sample.needles],
            "answer": sample.answer,
            "text": reading.text,
            "correct": reading.correct,
            "tokens": reading.tokens,
            "tokens_right": reading.tokens_right,
            "loss": reading.loss,
        }
        for sample, reading in zip(chosen, readings, strict=True)
    ]


def summarize(records: Sequence[Record], depths: int = DEPTHS) -> dict[str, Any]:
    """Accuracies of samples of one length, whole and by depth."""
    tokens = sum(record["tokens"] for record in records)
    needles = [pair for record in records for pair in zip(record["depths"], record["correct"], strict=True)]
    bins: list[list[bool]] = [[] for _ in range(depths)]
    for depth, correct in needles:
        bins[min(int(depth * depths), depths - 1)].append(correct)
    return {
        "length": records[0]["length"],
        **_accuracy(correct for _, correct in needles),
        "samples": len(records),
        "token_accuracy": sum(record["tokens_right"] for record in records) / tokens,
        "answer_loss": sum(record["loss"] * record["tokens"] for record in records) / tokens,
        "depths": [
            {"from": i / depths, "to": (i + 1) / depths, **_accuracy(found), "needles": len(found)}
            for i, found in enumerate(bins)
            if found
        ],
    }


def _accuracy(correct: Iterable[bool]) -> dict[str, float]:
    outcomes = list(correct)
    low, high = wilson(sum(outcomes), len(outcomes))
    return {"accuracy": sum(outcomes) / len(outcomes), "low": low, "high": high}


def _head(task: NeedleTask, seed: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What samples depend on, apart from their lengths."""
    return {"task": dataclasses.asdict(dataclasses.replace(task, length=1)), "seed": seed, **settings}


def _open_records(path: Path, head: Mapping[str, Any]) -> dict[tuple[int, int], Record]:
    """The records that a file already has, by length and index; its first line says what made it."""
    head = json.loads(json.dumps(head))
    lines = read_lines(path, "delete it to ask its samples again") if path.exists() else []
    if lines and lines[0] != {"settings": head}:
        raise ValueError(
            f"records {path} are of another run, task or training (see its first line): delete the file, "
            "or choose another folder"
        )
    kept = lines[1:]
    for record in kept:
        if not _is_sample(record):
            raise UnreadableFile(path, f"has a line that is not a sample: {record!r:.60}", "delete it to ask again")
    write_text(path, "".join(json.dumps(line) + "\n" for line in [{"settings": head}, *kept]))
    return {(record["length"], record["index"]): record for record in kept}


def _is_sample(record: Record) -> bool:
    """Whether a record has what `summarize` counts, in the right types."""
    if record.keys() != RECORD:
        return False
    counts = [record[name] for name in ("length", "index", "tokens", "tokens_right")]
    depths, correct = record["depths"], record["correct"]
    return (
        all(type(count) is int and 0 <= count < 2**63 for count in counts)
        and record["tokens"] > 0
        and isinstance(record["loss"], (int, float))
        and isinstance(depths, list)
        and isinstance(correct, list)
        and len(depths) == len(correct) > 0
        and all(isinstance(depth, (int, float)) and 0 <= depth <= 1 for depth in depths)
        and all(isinstance(right, bool) for right in correct)
    )


def default_task(config: GPTConfig) -> tuple[NeedleTask, NeedleTraining]:
    """The default task and training: the paper's, or easier ones for the mini preset."""
    mini = PRESETS["mini"]
    small = all(getattr(config, name) == getattr(mini, name) for name in ("layers", "width", "heads"))
    if small:
        return NeedleTask.mini().at(config.train_length), NeedleTraining.mini()
    return NeedleTask(length=config.train_length), NeedleTraining()


def run_needle(
    run: Path | str,
    lengths: str | Sequence[str] = ("1x", "4x", "16x"),
    out: Path | None = None,
    *,
    methods: Sequence[str] | None = None,
    task: NeedleTask | None = None,
    training: NeedleTraining | None = None,
    samples: int = SAMPLES,
    seed: int = 0,
    device: str = "auto",
    tolerance: float | None = None,
    summary: bool = True,
    progress: Progress = silent,
) -> dict[str, dict[str, Any]]:
    """Fine-tune a run on the needle task at its training length, then ask it at each length; results by method.

    Writes ``out/needle/<method>.json`` (the result), ``<method>.jsonl`` (every sample) and ``models/`` (what was
    fine-tuned). If interrupted, the same call resumes; other lengths join those that are there. A folder takes one
    task, and one run for each method: others are refused.

    Args:
        lengths: multiples of the training length ("4x") or tokens.
        out: None for the run's own folder.
        methods: for a RoPE-trained model also "rope+ntk" or "yarn"; None for the method it was trained as.
        task, training: None for `default_task`. The task's length is that of fine-tuning, which puts needles at random
            places even if the task has a depth.
        samples: at each length.
        seed: of the samples.
        device: "auto" for a GPU if there is one.
        tolerance: answer with a `scaleinv.CertifiedCache`, from the same fine-tuned model. The results then go to
            ``out/needle/certified/<tolerance>`` and not into the summary. None for exact attention.
        summary: also write the accuracies to ``out/summary.json``.
        progress: takes lines of text.
    """
    run = Path(run)
    folder = (run if out is None else Path(out)) / "needle"
    where = find_device(device)
    _check_counts(samples=samples)
    config, _ = store.read_config(run)
    model_method = trained_as(config.model.method)
    methods = list(methods) if methods else [config.model.method]
    for method in methods:
        if trained_as(method) != model_method:
            raise ValueError(f"methods must be served by a model trained as {model_method!r}, got {method!r}")
    named = parse(lengths, config.model.train_length)
    usual_task, usual_training = default_task(config.model)
    task, training = task or usual_task, training or usual_training
    corpus = store.run_corpus(config)
    for length in named.values():  # an impossible length raises before the fine-tuning
        make_sample(task.at(length), corpus.val, corpus.tokenizer, seed=seed, index=0)
    settings = {
        "train_length": config.model.train_length,
        "task": dataclasses.asdict(task),
        "training": training.to_json(),
        "samples_seed": seed,
        "base": {"steps": config.steps},
        "corpus": corpus.description,
    }
    made_by = {"run": store.weights_digest(run), "training": settings["training"], "corpus": corpus.sha256}
    heads = {method: {"row": method, **made_by} for method in methods}
    answers, summary = folder, summary and tolerance is None
    if tolerance is not None:
        answers = folder / "certified" / f"{tolerance:g}"
        settings["tolerance"] = tolerance
        heads = {method: {**head, "tolerance": tolerance} for method, head in heads.items()}
    for method, head in heads.items():
        _open_records(answers / f"{method}.jsonl", _head(task, seed, head))
    if summary:
        _check_summary(folder.parent, methods, settings)
    finetuned = folder / "models" / f"{model_method}-seed{config.seed}"
    anywhere = dataclasses.replace(task, depth=None)  # the depth applies to the questions, not to training
    finetune(run, finetuned, anywhere, training, corpus=corpus, device=where, progress=progress)
    model, _ = store.load_model(finetuned, where)
    results = {}
    for method in methods:
        model.use_method(method)
        found = evaluate(
            model,
            corpus.val,
            corpus.tokenizer,
            task,
            named,
            samples=samples,
            seed=seed,
            records=answers / f"{method}.jsonl",
            settings=heads[method],
            tolerance=tolerance,
            batch_tokens=65_536 if where.type == "cuda" else 16_384,
            progress=progress,
        )
        result = {"row": method, "seed": config.seed, "settings": settings, "lengths": found}
        results[method] = _save(answers / f"{method}.json", result)
        for label, at in found.items():
            progress(f"{method} at {label}: accuracy {at['accuracy']:.3f} [{at['low']:.3f}, {at['high']:.3f}]")
    if summary:
        enter_in_summary(folder.parent, results)
    return results


def _save(path: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Write a result, keeping the lengths that the file already has if they are of the same samples; returns it.

    A damaged file is replaced: the records have every sample.
    """
    try:
        earlier = read_object(path)
    except UnreadableFile:
        earlier = {}
    same = all(earlier.get(name) == json.loads(json.dumps(result[name])) for name in ("row", "seed", "settings"))
    if same and isinstance(earlier.get("lengths"), dict):
        result = {**result, "lengths": {**earlier["lengths"], **result["lengths"]}}
    write_json(path, result)
    return result


def _check_summary(folder: Path, methods: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Raise ValueError if the folder's summary has other methods with another task: one table cannot hold both."""
    path = folder / SUMMARY
    there = read_summary_if_any(path)
    if set(there.needle) - set(methods) and there.settings.get("needle") != json.loads(json.dumps(settings)):
        raise ValueError(f"{path} has needle results of another task or training: choose another folder")


def enter_in_summary(folder: Path, results: Mapping[str, dict[str, Any]]) -> Path:
    """Add the accuracies of each method by length to a folder's summary.json."""
    path = folder / SUMMARY
    summary = read_summary_if_any(path)
    for method, result in results.items():
        found = {label: parse_accuracy(at, f"{method} at {label}") for label, at in result["lengths"].items()}
        settings = result["settings"]
        summary = summary.with_needle({method: found}, settings, settings["train_length"])
    write_summary(path, summary)
    return path
