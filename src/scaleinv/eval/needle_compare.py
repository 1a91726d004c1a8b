"""Needles for all models of a comparison: each is fine-tuned and asked in a process of its own, several at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from scaleinv import lengths as context_lengths
from scaleinv.constants import TAU
from scaleinv.eval.board import ToDo
from scaleinv.eval.needle import SAMPLES, default_task, needle_settings
from scaleinv.eval.needle_results import Result, check_folder, enter_in_summary, pooled, read_results
from scaleinv.eval.needle_task import NeedleTask, make_sample
from scaleinv.eval.needle_train import NeedleTraining
from scaleinv.eval.plan import finished
from scaleinv.eval.summary import SUMMARY, ordered_methods, read_summary_if_any
from scaleinv.eval.work import NeedleWork
from scaleinv.eval.workers import jobs_at_once, work_through
from scaleinv.files import locked
from scaleinv.methods import trained_as
from scaleinv.progress import Progress, silent
from scaleinv.train.config import TrainConfig
from scaleinv.train.store import CONFIG, check_writable, read_config, run_corpus

RUNS = "runs"


@dataclasses.dataclass(frozen=True)
class _Model:
    """A trained model of a comparison, and the methods to ask it as."""

    run: Path
    config: TrainConfig
    methods: tuple[str, ...]


def is_comparison(folder: Path) -> bool:
    """Whether a folder is a comparison's rather than a run's."""
    return (folder / RUNS).is_dir() and not (folder / CONFIG).exists()


def first_config(folder: Path) -> TrainConfig:
    """How a run was trained, or one of a comparison's."""
    if is_comparison(folder):
        return next(iter(_models(folder, None).values())).config
    return read_config(folder)[0]


def needle_comparison(
    folder: Path | str,
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
    jobs: int | None = None,
    progress: Progress = silent,
) -> dict[str, Result]:
    """`scaleinv.eval.needle.run_needle` for every finished model of a comparison; results by method, seeds pooled.

    If interrupted, the same call resumes.

    Args:
        folder: what `scaleinv compare` wrote.
        out: None for the same folder.
        methods: None for all that the comparison measured.
        jobs: processes at once; None for one per core, or one on a GPU.
    """
    folder = Path(folder)
    out = folder if out is None else Path(out)
    models = _models(folder, methods)
    config = next(iter(models.values())).config
    usual_task, usual_training = default_task(config.model)
    named = context_lengths.parse(lengths, config.model.train_length)
    corpus = run_corpus(config)
    task = task or usual_task
    training = (training or usual_training).fitted(task, corpus.tokenizer)
    for length in (task.length, *named.values()):  # an impossible length raises before any model is fine-tuned
        make_sample(task.at(length), corpus.val, corpus.tokenizer, seed=0, index=0)
    settings = needle_settings(config, corpus, task, training, tolerance)
    check_writable(out)
    with locked(out):
        if tolerance is None:
            making = [(method, model.config.seed) for model in models.values() for method in model.methods]
            check_folder(out, making, settings)
        count = jobs_at_once(jobs, len(models), device)
        progress(f"{len(models)} models to fine-tune and ask; {count} at once")

        def todo(model: _Model) -> ToDo:
            passes = [(length, samples * length) for _ in model.methods for length in named.values()]
            return ToDo(model.config.model, training.steps, training.sequences * task.length, passes)

        def work(name: str) -> NeedleWork:
            model = models[name]
            asked = (lengths, str(out), model.methods, task, training, samples, seed, device, tolerance)
            return NeedleWork(str(model.run), *asked)

        def collect() -> dict[str, Result]:
            answers = out / "needle" if tolerance is None else out / "needle" / "certified" / f"{tolerance:g}"
            there = read_results(answers)
            found = {
                method: pooled([result for result in there if result["row"] == method])
                for method in ordered_methods(result["row"] for result in there)
            }
            if tolerance is None:
                enter_in_summary(out, found, settings)
            return found

        work_through(
            {name: todo(model) for name, model in models.items()},
            work,
            count=count,
            out=out,
            progress=progress,
            done=collect,
        )
        return collect()


def _models(folder: Path, methods: Sequence[str] | None) -> dict[str, _Model]:
    """The finished models that serve the methods, seed by seed; ValueError if a method has none."""
    runs = [path.parent for path in sorted((folder / RUNS).glob(f"*/{CONFIG}"))]
    configs = {run: read_config(run)[0] for run in runs if finished(run)}
    configs = {run: config for run, config in configs.items() if config.model.tau == TAU}  # not those of a sweep
    if not configs:
        raise ValueError(f"{folder / RUNS} has no finished models: `scaleinv compare` trains them")
    measured = read_summary_if_any(folder / SUMMARY).loss
    wanted = list(methods or measured or {config.model.method for config in configs.values()})
    trained = {config.model.method for config in configs.values()}
    for method in wanted:
        if trained_as(method) not in trained:
            raise ValueError(f"methods must be served by a model in {folder / RUNS}, got {method!r}")
    found = {}
    for run in sorted(configs, key=lambda run: configs[run].seed):
        served = tuple(method for method in wanted if trained_as(method) == configs[run].model.method)
        if served:
            found[run.name] = _Model(run, configs[run], served)
    order = ordered_methods(wanted)
    return dict(sorted(found.items(), key=lambda item: (item[1].config.seed, order.index(item[1].methods[0]))))
