"""The paper's table: train each distinct model once a seed, evaluate every row, sum up.

Every training and evaluation is a process of its own, so that several run at once and a killed comparison goes on where
it was: runs resume from their checkpoints, finished ones are not repeated.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from scaleinv import methods, schedule
from scaleinv.eval.loss import TOKENS
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
from scaleinv.files import read_object, write_text
from scaleinv.lengths import parse
from scaleinv.machine import cpu_name
from scaleinv.train.config import preset
from scaleinv.train.logs import METRICS
from scaleinv.train.store import CONFIG, read_config, weights_digest, weights_step
from scaleinv.version import VERSION

SWEPT = "scale-invariant-p-rope"
"""The row whose lengthscale a sweep varies."""


@dataclasses.dataclass
class Comparison:
    """What to compare; the options are those of `scaleinv train` and `scaleinv evaluate`."""

    out: Path
    methods: Sequence[str] = ("all",)
    preset: str = "mini"
    data: str = "sotu"
    val_data: str | None = None
    tokenizer: str | None = None
    order: str = "random"
    """Of the training windows: "random" or "sequential"."""
    seeds: int = 3
    steps: int | None = None
    train_length: int | None = None
    lengths: str = "1x,4x,16x"
    tokens: int | None = None
    """Validation tokens; None for the evaluation's default."""
    tau: Sequence[float] = ()
    """Lengthscales of a sweep, for figure 5."""
    device: str = "auto"
    """To train and evaluate on; "auto" for a GPU where there is one."""
    jobs: int | None = None
    """Processes at once; None for one a core, or one on a GPU."""
    command: str | None = None
    """What the user typed, for the record."""

    def __post_init__(self) -> None:
        self.out = Path(self.out)
        self.methods = methods.names() if list(self.methods) == ["all"] else list(dict.fromkeys(self.methods))
        self.tau = list(dict.fromkeys(self.tau))
        for name in self.methods:
            methods.row(name)
        parse(self.lengths, preset(self.preset, train_length=self.train_length).model.train_length)
        if self.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        for name in ("seeds", "tokens", "jobs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        schedule.check_parameters(list(self.tau) or schedule.TAU, schedule.HEIGHT, schedule.HEIGHT)


class Stopped(RuntimeError):
    """A signal ended the comparison; what was finished is kept."""

    def __init__(self, number: int, out: Path) -> None:
        super().__init__(f"stopped; run the same command again to go on with {out}")
        self.signal = number


@dataclasses.dataclass(frozen=True)
class Job:
    """One model to train, and the rows it serves."""

    model: str
    seed: int
    rows: tuple[str, ...]
    tau: float | None = None

    @property
    def name(self) -> str:
        lengthscale = "" if self.tau is None else f"-tau{self.tau:g}"
        return f"{self.model}{lengthscale}-seed{self.seed}"


def compare(plan: Comparison, say: Callable[[str], None] = lambda text: None) -> Summary:
    """Run the comparison, or what is left of it; writes and returns the summary."""
    jobs = _jobs(plan)
    _check_settings(plan)
    cores = os.cpu_count() or 1
    workers = min(plan.jobs or (cores if plan.device == "cpu" else 1), len(jobs))
    seeds = "1 seed" if plan.seeds == 1 else f"{plan.seeds} seeds"
    say(f"{len(jobs)} models to train for {len(plan.methods)} rows, {seeds}; {workers} at once")
    runner = _Runner(plan, say, threads=max(1, cores // workers))
    problems = []
    with runner, ThreadPoolExecutor(workers) as pool:
        pending = {pool.submit(runner.run, job): job for job in jobs}
        for done in as_completed(pending):
            error = done.exception()
            if runner.stopped:
                continue
            if error is not None:
                problems.append(f"{pending[done].name}: {error}")
                say(f"failed: {problems[-1]}")
            else:
                summarize(plan)
    if runner.stopped:
        raise Stopped(runner.stopped, plan.out)
    if problems:
        raise RuntimeError("some models failed: " + "; ".join(problems))
    return summarize(plan)


def summarize(plan: Comparison) -> Summary:
    """Write summary.json, curves/ and sweep.json from what is finished."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    sweep: dict[str, dict[str, list[dict[str, float]]]] = {}
    corpus = None
    (plan.out / "curves").mkdir(parents=True, exist_ok=True)
    for job in _jobs(plan):
        run = plan.out / "runs" / job.name
        if not (run / METRICS).exists():
            continue
        write_text(plan.out / "curves" / f"{job.name}.jsonl", (run / METRICS).read_text())
        corpus = read_config(run)[1]["corpus"]
        for row in job.rows:
            path = _evaluation(plan, job, row)
            if not _evaluated(plan, run, path):
                continue
            for label, result in read_object(path)["lengths"].items():
                if job.tau is None:
                    found.setdefault(row, {}).setdefault(label, []).append(result)
                if row == SWEPT and (job.tau is not None or plan.tau):
                    name = f"{schedule.TAU if job.tau is None else job.tau:g}"
                    sweep.setdefault(name, {}).setdefault(label, []).append(result)
    alone = plan.seeds == 1
    path = plan.out / SUMMARY
    summary = read_summary_if_any(path).with_loss(
        {row: _over_seeds(by, alone) for row, by in found.items()}, _settings(plan, corpus), asked=plan.methods
    )
    write_summary(path, summary)
    if sweep:
        path = plan.out / SWEEP
        values = read_sweep(path, summary.train_length) if path.exists() else {}
        write_sweep(path, values | {tau: _over_seeds(by, alone) for tau, by in sweep.items()})
    return summary


class _Runner:
    """Starts the processes of a comparison, and stops them with it."""

    def __init__(self, plan: Comparison, say: Callable[[str], None], threads: int) -> None:
        self.plan, self.say, self.threads = plan, say, threads
        self.lock = threading.Lock()
        self.running: set[subprocess.Popen] = set()
        self.stopped = 0  # the number of the signal

    def __enter__(self) -> _Runner:
        self.handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.handlers[number] = signal.signal(number, self.stop)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def stop(self, number: int, frame: object) -> None:
        """Let every process save and leave."""
        self.stopped = number
        with self.lock:
            for process in self.running:
                process.terminate()

    def run(self, job: Job) -> None:
        """Train and evaluate, skipping what is done."""
        plan, run = self.plan, self.plan.out / "runs" / job.name
        if not _finished(run):
            self._call(job, ["train", *self._training(job, run)])
        rows = [row for row in job.rows if not _evaluated(plan, run, _evaluation(plan, job, row))]
        if rows:
            folder = _evaluation(plan, job, rows[0]).parent
            options = ["--methods", ",".join(rows), "--lengths", plan.lengths, "--device", plan.device]
            options += ["--out", str(folder)]
            if plan.tokens is not None:
                options += ["--tokens", str(plan.tokens)]
            self._call(job, ["evaluate", str(run), *options])

    def _training(self, job: Job, run: Path) -> list[str]:
        if (run / CONFIG).exists():
            return ["--resume", str(run), "--device", self.plan.device]
        plan = self.plan
        options = {
            "--preset": plan.preset,
            "--method": job.model,
            "--data": plan.data,
            "--val-data": plan.val_data,
            "--tokenizer": plan.tokenizer,
            "--order": plan.order,
            "--steps": plan.steps,
            "--train-length": plan.train_length,
            "--tau": job.tau,
            "--seed": job.seed,
            "--device": plan.device,
            "--keep": 1,
            "--out": run,
        }
        return [str(x) for flag, value in options.items() if value is not None for x in (flag, value)]

    def _call(self, job: Job, arguments: list[str]) -> None:
        if self.stopped:
            raise RuntimeError("stopped")
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads)}
        process = subprocess.Popen(
            [sys.executable, "-m", "scaleinv", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches us alone, and we tell the others
        )
        with self.lock:
            self.running.add(process)
            if self.stopped:  # in between
                process.terminate()
        last = ""
        assert process.stdout is not None
        for line in process.stdout:
            last = line.strip() or last
            if line.startswith(("step ", "validation ")) or " tokens): " in line:
                self.say(f"{job.name}: {last}")
        code = process.wait()
        with self.lock:
            self.running.discard(process)
        if code:
            raise RuntimeError(last or f"exit code {code}")


def _jobs(plan: Comparison) -> list[Job]:
    """Distinct models, seed by seed, so that early results cover all rows."""
    served: dict[str, list[str]] = {}
    for name in plan.methods:
        served.setdefault(methods.trained_as(name), []).append(name)
    jobs = []
    for seed in range(plan.seeds):
        jobs += [Job(model, seed, tuple(rows)) for model, rows in served.items()]
        for tau in plan.tau:
            if tau != schedule.TAU:
                jobs.append(Job(SWEPT, seed, (SWEPT,), tau))
            elif SWEPT not in served:
                jobs.append(Job(SWEPT, seed, (SWEPT,)))
    return jobs


def _evaluation(plan: Comparison, job: Job, row: str) -> Path:
    folder = plan.out / "evaluations" if job.tau is None else plan.out / "sweep" / f"tau{job.tau:g}"
    return folder / f"{row}-seed{job.seed}.json"


def _check_settings(plan: Comparison) -> None:
    """ValueError if the folder holds a comparison of other settings: they would mix silently."""
    usual = preset(plan.preset, train_length=plan.train_length)
    wanted = {name: getattr(plan, name) for name in ("data", "val_data", "tokenizer", "order")}
    wanted["steps"] = plan.steps or usual.steps
    wanted |= {name: getattr(usual.model, name) for name in ("layers", "width", "heads", "train_length")}
    there = {}
    path = plan.out / SUMMARY
    if path.exists():
        there[path] = {"order": "sequential", **read_summary_if_any(path).settings}
    for path in sorted((plan.out / "runs").glob(f"*/{CONFIG}")):
        config = read_config(path.parent)[0]
        there[path] = {**dataclasses.asdict(config.model), **dataclasses.asdict(config)}
    for path, found in there.items():
        for name, value in wanted.items():
            if name in found and found[name] != value:
                raise ValueError(
                    f"{path} is of a comparison with {name}={found[name]}, and {name}={value} is asked for: "
                    "use another out"
                )


def _evaluated(plan: Comparison, run: Path, path: Path) -> bool:
    """Are these weights evaluated, at all the lengths and on as many tokens as the plan asks for?"""
    if not path.exists() or not _finished(run):
        return False
    found = read_object(path)
    return (
        found["lengths"].keys() >= parse(plan.lengths, found["train_length"]).keys()
        and found.get("tokens") == (plan.tokens or TOKENS)
        and found.get("weights") == weights_digest(run)
    )


def _finished(run: Path) -> bool:
    return (run / CONFIG).exists() and weights_step(run) == read_config(run)[0].steps


def _over_seeds(by_length: dict[str, list[dict[str, float]]], alone: bool) -> dict[str, Measurement]:
    """Mean and standard error over seeds at each length; with a single seed for all, the error over windows."""
    found = {}
    for label, values in by_length.items():
        means = [value["mean"] for value in values]
        error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
        found[label] = loss(statistics.fmean(means), values[0]["stderr"] if alone else error, len(means))
    return found


def _settings(plan: Comparison, corpus: dict[str, Any] | None) -> dict[str, Any]:
    run = next(iter(sorted((plan.out / "runs").glob(f"*/{CONFIG}"))), None)
    config = read_config(run.parent)[0] if run else None
    return {
        "command": plan.command,
        "preset": plan.preset,
        "data": plan.data,
        "val_data": plan.val_data,
        "tokenizer": plan.tokenizer,
        "order": plan.order,
        "corpus_sha256": corpus["sha256"] if corpus else None,
        "train_length": config.model.train_length if config else plan.train_length,
        "steps": config.steps if config else plan.steps,
        "batch_tokens": config.batch_tokens if config else None,
        "learning_rates": {name: getattr(config, f"lr_{name}") for name in ("matrices", "embedding", "output")}
        if config
        else None,
        "layers": config.model.layers if config else None,
        "width": config.model.width if config else None,
        "heads": config.model.heads if config else None,
        "seeds": plan.seeds,
        "lengths": plan.lengths,
        "validation_tokens": plan.tokens or TOKENS,
        "stderr": "over seeds" if plan.seeds > 1 else "over validation windows",
        "machine": f"{cpu_name()}, {os.cpu_count()} cores",
        "versions": {"scaleinv": VERSION, "torch": torch.__version__, "python": platform.python_version()},
    }
