"""The paper's table: train each distinct model per seed, evaluate every method, sum up.

Every model is trained and evaluated in a process of its own (`scaleinv.eval.worker`), so that several run at once. If
the comparison is interrupted, the same call resumes it: runs continue from their checkpoints, and what is finished is
not repeated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import platform
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from scaleinv import lengths
from scaleinv.constants import TAU
from scaleinv.eval.board import ToDo
from scaleinv.eval.plan import SWEPT, Comparison, Job, finished, resumed, training_settings
from scaleinv.eval.summary import (
    SUMMARY,
    SWEEP,
    Measurement,
    Summary,
    loss,
    read_summary_if_any,
    read_sweep,
    write_summary,
    write_sweep,
)
from scaleinv.eval.work import Work
from scaleinv.eval.workers import jobs_at_once, work_through
from scaleinv.files import locked, remove_leftovers, write_text
from scaleinv.machine import cpu_name, find_device
from scaleinv.model import GPT
from scaleinv.progress import Progress, silent
from scaleinv.train.logs import METRICS
from scaleinv.train.store import CONFIG, check_writable, read_config, run_corpus, run_tokenizer
from scaleinv.train.validation import LengthLoss, usable_tokens
from scaleinv.version import VERSION

CURVES = "curves"
COUNTED = 65_536
"""Validation tokens used to count the bytes per token."""


def compare(plan: Comparison, progress: Progress = silent) -> Summary:
    """Run the comparison, or the rest of it; writes and returns the summary."""
    with _empty_folders_removed(plan.out / "runs"):
        check_writable(plan.out)
        with locked(plan.out):
            remove_leftovers(plan.out, plan.out / CURVES, *{plan.evaluation(job, "").parent for job in plan.all_jobs()})
            return _run(plan, _check(plan), progress)


def _check(plan: Comparison) -> int:
    """How many of the held-out tokens are used; ValueError for anything that would stop every model."""
    config = plan.config(plan.all_jobs()[0])
    find_device(config.device)
    corpus = run_corpus(config, config.model.train_length, fit=True)
    named = lengths.parse(plan.lengths, config.model.train_length)
    used = usable_tokens(corpus.val.total, plan.tokens, list(named.values()))
    plan.check_folder(corpus.sha256)
    return used


def _run(plan: Comparison, tokens: int, progress: Progress) -> Summary:
    jobs = {job.name: job for job in plan.all_jobs()}
    count = jobs_at_once(plan.jobs, len(jobs), plan.config(plan.all_jobs()[0]).device)
    seeds = "1 seed" if plan.seeds == 1 else f"{plan.seeds} seeds"
    progress(f"{len(jobs)} models for {len(plan.methods)} methods, {seeds}; {count} at once")
    work_through(
        {name: todo(plan, job, tokens) for name, job in jobs.items()},
        lambda name: work_left(plan, jobs[name]),
        count=count,
        out=plan.out,
        progress=progress,
        done=lambda: summarize(plan),
    )
    return summarize(plan)


def todo(plan: Comparison, job: Job, tokens: int) -> ToDo:
    """The whole work of a model, whether done or not, where so many held-out tokens are used."""
    config = plan.config(job)
    named = lengths.parse(plan.lengths, config.model.train_length)
    passes = [(length, tokens) for _ in job.methods for length in named.values()]
    return ToDo(config.model, config.steps, config.batch_tokens, passes)


def work_left(plan: Comparison, job: Job) -> Work | None:
    """What is left to do for a model; None if nothing is."""
    run, config = plan.run(job), plan.config(job)
    resume = (run / CONFIG).exists()
    train = None if finished(run) else resumed(config) if resume else config
    left = tuple(name for name in job.methods if plan.evaluated(job, name) is None)
    if train is None and not left:
        return None
    out = plan.evaluation(job, job.methods[0]).parent
    return Work(str(run), train, resume, left, plan.lengths, plan.tokens, config.device, str(out))


def summarize(plan: Comparison) -> Summary:
    """Write summary.json, curves/ and sweep.json from what is finished, also by an earlier command with more seeds."""
    path = plan.out / SUMMARY
    before = read_summary_if_any(path)
    asked, plan = plan.seeds, dataclasses.replace(plan, seeds=max(plan.seeds, before.settings.get("seeds") or 1))
    found: dict[str, dict[str, list[LengthLoss]]] = {}
    sweep: dict[str, dict[str, list[LengthLoss]]] = {}
    for job in plan.all_jobs():
        metrics = plan.run(job) / METRICS
        if metrics.exists():
            write_text(plan.out / CURVES / f"{job.name}.jsonl", metrics.read_text(encoding="utf-8"))
        for name in job.methods:
            evaluation = plan.evaluated(job, name)
            for label, result in evaluation.lengths.items() if evaluation else ():
                if job.tau is None:
                    found.setdefault(name, {}).setdefault(label, []).append(result)
                if name == SWEPT and (job.tau is not None or plan.tau) and job.seed < asked:  # same seeds for every τ
                    tau = f"{TAU if job.tau is None else job.tau:g}"
                    sweep.setdefault(tau, {}).setdefault(label, []).append(result)
    alone = plan.seeds == 1
    losses = {name: over_seeds(by_length, alone) for name, by_length in found.items()}
    results = [result for by_length in found.values() for several in by_length.values() for result in several]
    used = max((result.windows * result.length for result in results), default=None)
    settings = {**_settings(plan), "validation_tokens": used}
    summary = before.with_loss(losses, settings, asked=plan.methods)
    write_summary(path, summary)
    if sweep:
        path = plan.out / SWEEP
        values = read_sweep(path, summary.train_length) if path.exists() else {}
        write_sweep(path, values | {tau: over_seeds(by_length, asked == 1) for tau, by_length in sweep.items()})
    return summary


def error_over(seeds: int) -> str:
    """What the standard errors of `over_seeds` are over, for ``settings.stderr``."""
    return "over seeds" if seeds > 1 else "over validation windows"


def over_seeds(by_length: dict[str, list[LengthLoss]], alone: bool) -> dict[str, Measurement]:
    """Mean and standard error over seeds at each length; if every method has one seed, the error over windows."""
    found = {}
    for label, values in by_length.items():
        means = [value.mean for value in values]
        error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
        found[label] = loss(statistics.fmean(means), values[0].stderr if alone else error, len(means))
    return found


def _settings(plan: Comparison) -> dict[str, Any]:
    config = plan.config(plan.all_jobs()[0])
    runs = sorted((plan.out / "runs").glob(f"*/{CONFIG}"))
    return {
        "command": plan.command,
        "preset": plan.preset,
        "data": config.data,
        "val_data": config.val_data,
        "tokenizer": config.tokenizer,
        "corpus_sha256": read_config(runs[0].parent)[1]["corpus"]["sha256"] if runs else None,
        **training_settings(config),
        "tokens": _tokens(runs[0].parent) if runs else None,
        "parameters": _parameters(plan),
        "seeds": plan.seeds,
        "lengths": plan.lengths,
        "training_validation_tokens": config.val_tokens,
        "stderr": error_over(plan.seeds),
        "machine": f"{cpu_name()}, {os.cpu_count()} cores",
        "versions": {"scaleinv": VERSION, "torch": torch.__version__, "python": platform.python_version()},
    }


@contextlib.contextmanager
def _empty_folders_removed(folder: Path) -> Iterator[None]:
    """Remove the folders that the body makes, down to ``folder``, if they stay empty."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            for path in made:
                if path.exists():
                    path.rmdir()


@functools.cache
def _tokens(run: Path) -> dict[str, Any]:
    """The unit of a loss: the tokenizer, and how many bytes of the validation text a token stands for."""
    config, _ = read_config(run)
    tokenizer, data = run_tokenizer(run), run_corpus(config).val
    ids = data.read(0, min(data.total, COUNTED)).tolist()
    text = [token for token in ids if token != tokenizer.end_of_text]
    size = len(tokenizer.decode(text).encode("utf-8", "surrogateescape")) / len(ids)
    named = {"tokenizer": tokenizer.name, "vocabulary": config.model.vocab_size}
    return {**named, "bytes_per_token": 1.0 if tokenizer.name == "bytes" else round(size, 4)}


def _parameters(plan: Comparison) -> dict[str, int]:
    """The parameters of each trained model, by its method."""
    found = {}
    for job in plan.all_jobs():
        if job.tau is None and (plan.run(job) / CONFIG).exists():
            with torch.device("meta"):
                found[job.model] = GPT(read_config(plan.run(job))[0].model).count_parameters()
    return found
