"""Needle in a haystack (arXiv 2505.17083): fine-tune a run on the task, then ask it at any length and depth.

`run_needle` does all of it, and resumes if interrupted; `evaluate` is the second half, for any model. The task is in
`needle_task`, fine-tuning in `needle_train`, decoding in `needle_decode`, the files in `needle_results`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleinv.data import Corpus, TokenData, Tokenizer
from scaleinv.eval.certified import check_tolerance
from scaleinv.eval.needle_decode import read_samples
from scaleinv.eval.needle_results import (
    DEPTHS,
    Record,
    Result,
    check_folder,
    enter_in_summary,
    result_path,
    save_result,
    summarize,
)
from scaleinv.eval.needle_task import NeedleTask, make_sample
from scaleinv.eval.needle_train import NeedleTraining, finetune
from scaleinv.files import UnreadableFile, read_lines, write_text
from scaleinv.lengths import parse
from scaleinv.machine import find_device
from scaleinv.methods import trained_as
from scaleinv.model import GPT, PRESETS, GPTConfig
from scaleinv.progress import Progress, Report, silent
from scaleinv.train import TrainConfig, store
from scaleinv.train.passes import precision

SAMPLES = 100
"""Samples per length."""
RECORD = {"length", "index", "depths", "answer", "text", "correct", "tokens", "tokens_right", "loss"}
"""What a record of a sample holds."""


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
            method, text = model.config.method, f"needle at {label}: {asked}/{samples} samples"
            count = {"done": asked, "total": samples}
            progress(Report(text, passing=True, kind="samples", method=method, length=label, **count))
        at = summarize([done[length, index] for index in range(samples)], depths)
        text = f"{model.config.method} at {label}: accuracy {at['accuracy']:.3f} [{at['low']:.3f}, {at['high']:.3f}]"
        named = {"method": model.config.method, "length": label, "mean": at["accuracy"]}
        progress(Report(text, kind="evaluated", **named))
        results[label] = at
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
    lengths: str = "1x,4x,16x",
    out: Path | None = None,
    *,
    methods: Sequence[str] | None = None,
    task: NeedleTask | None = None,
    training: NeedleTraining | None = None,
    samples: int = SAMPLES,
    seed: int | None = None,
    device: str = "auto",
    tolerance: float | None = None,
    summary: bool = True,
    progress: Progress = silent,
) -> dict[str, Result]:
    """Fine-tune a run on the needle task at its training length, then ask it at each length; results by method.

    Writes ``out/needle/<method>-seed<n>.json`` (the result; n is the run's seed), ``.jsonl`` (every sample) and
    ``models/`` (what was fine-tuned). If interrupted, the same call resumes; other lengths join those that are there.
    A folder takes one task, and one run for each method and seed: others are refused.

    Args:
        lengths: multiples of the training length ("4x") or tokens.
        out: None for the run's own folder.
        methods: for a RoPE-trained model also "rope+ntk" or "yarn"; None for the method it was trained as.
        task, training: None for `default_task`. The task's length is that of fine-tuning, which puts needles at random
            places even if the task has a depth.
        samples: at each length.
        seed: of the samples; None for the run's own.
        device: "auto" for a GPU if there is one.
        tolerance: answer with a `scaleinv.CertifiedCache`, from the same fine-tuned model. The results then go to
            ``out/needle/certified/<tolerance>`` and not into the summary. None for exact attention.
        summary: also write the accuracies, pooled over the seeds of a method, to ``out/summary.json``.
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
        check_tolerance(tolerance, method)
    named = parse(lengths, config.model.train_length)
    usual_task, usual_training = default_task(config.model)
    seed = config.seed if seed is None else seed
    corpus = store.run_corpus(config)
    task = task or usual_task
    training = (training or usual_training).fitted(task, corpus.tokenizer)
    for length in named.values():  # an impossible length raises before the fine-tuning
        make_sample(task.at(length), corpus.val, corpus.tokenizer, seed=seed, index=0)
    settings = needle_settings(config, corpus, task, training, tolerance)
    answers = folder if tolerance is None else folder / "certified" / f"{tolerance:g}"
    summary = summary and tolerance is None
    if tolerance is None:
        check_folder(folder.parent, [(method, config.seed) for method in methods], settings)
    made_by: dict[str, Any] = {"run": store.weights_digest(run), "training": training.to_json()}
    made_by |= {"corpus": corpus.sha256} | ({} if tolerance is None else {"tolerance": tolerance})
    records = {method: result_path(answers, method, config.seed).with_suffix(".jsonl") for method in methods}
    for method, path in records.items():
        _open_records(path, _head(task, seed, {"row": method, **made_by}))
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
            records=records[method],
            settings={"row": method, **made_by},
            tolerance=tolerance,
            batch_tokens=65_536 if where.type == "cuda" else 16_384,
            progress=progress,
        )
        made = {"row": method, "seed": config.seed, "samples_seed": seed, "settings": settings}
        results[method] = save_result(answers, {**made, "lengths": found})
    if summary:
        enter_in_summary(folder.parent, methods, settings)
    return results


def needle_settings(
    config: TrainConfig, corpus: Corpus, task: NeedleTask, training: NeedleTraining, tolerance: float | None = None
) -> dict[str, Any]:
    """What the accuracies of all methods and seeds in a folder have in common."""
    values = {
        "train_length": config.model.train_length,
        "task": dataclasses.asdict(task),
        "training": {name: value for name, value in training.to_json().items() if name != "seed"},
        "base": {"steps": config.steps},
        "corpus": corpus.description,
    }
    return values if tolerance is None else {**values, "tolerance": tolerance}
