"""What a comparison trains and evaluates, and how much of it is done."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleinv import lengths, methods
from scaleinv.constants import TAU
from scaleinv.eval.loss import TOKENS, Evaluation, read_evaluation
from scaleinv.eval.summary import SUMMARY, read_summary_if_any
from scaleinv.files import UnreadableFile
from scaleinv.settings import settings
from scaleinv.train.config import TrainConfig, preset
from scaleinv.train.store import CONFIG, read_config, weights_digest, weights_step

SWEPT = "scale-invariant-p-rope"
"""The method whose lengthscale a sweep varies."""

USUAL: dict[str, Any] = {"data": "sotu", "keep": 1, "val_lengths": "none"}
"""Defaults that differ from those of a single run: a model is evaluated once, after training."""

OWN = ("method", "seed", "out", "tau")
"""Settings that a comparison gives to each of its models."""

FREE = ("device", "parallel", "compile", "micro_tokens", "keep", "checkpoint_every", "log_every", "wandb")
"""Settings that leave a trained model as it is, within rounding."""


@dataclasses.dataclass
class Comparison:
    """What to compare."""

    out: Path
    methods: Sequence[str] = ("all",)
    preset: str = "mini"
    train: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of `TrainConfig` and `GPTConfig` by name that differ from the preset's: ``{"steps": 400}``."""
    seeds: int = 3
    lengths: str = "1x,4x,16x"
    """Context lengths to evaluate at, in multiples of the training length or in tokens."""
    tokens: int = TOKENS
    """Validation tokens."""
    tau: Sequence[float] = ()
    """Lengthscales of a sweep, for figure 5."""
    jobs: int | None = None
    """Processes at once; None for one per core, or one on a GPU."""
    command: str | None = None
    """What the user typed, for the record."""

    def __post_init__(self) -> None:
        self.out = Path(self.out)
        self.methods = methods.names() if list(self.methods) == ["all"] else list(dict.fromkeys(self.methods))
        self.tau = list(dict.fromkeys(self.tau))
        if not self.methods:
            raise ValueError("methods must name at least one method, got none")
        for name in self.methods:
            methods.row(name)
        for name in ("seeds", "tokens", "jobs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        for name in OWN:
            if name in self.train:
                raise ValueError(f"{name} is chosen for each model of a comparison: train cannot set it")
        for job in self.all_jobs():
            config = self.config(job)
        lengths.parse(self.lengths, config.model.train_length)

    def all_jobs(self) -> list[Job]:
        """Distinct models, seed by seed, so that early results cover all methods."""
        served: dict[str, list[str]] = {}
        for name in self.methods:
            served.setdefault(methods.trained_as(name), []).append(name)
        jobs = []
        for seed in range(self.seeds):
            jobs += [Job(model, seed, tuple(names)) for model, names in served.items()]
            for tau in self.tau:
                if tau != TAU:
                    jobs.append(Job(SWEPT, seed, (SWEPT,), tau))
                elif SWEPT not in served:
                    jobs.append(Job(SWEPT, seed, (SWEPT,)))
        return jobs

    def config(self, job: Job) -> TrainConfig:
        """How a model is trained."""
        own = {"seed": job.seed, "out": str(self.run(job))} | ({} if job.tau is None else {"tau": job.tau})
        given = {**USUAL, **self.train, **own}
        if methods.row(job.model).logits != "scale-invariant":
            given.pop("learnable_tau", None)  # the other methods do not have it
        return preset(self.preset, job.model, **given)

    def run(self, job: Job) -> Path:
        """The folder of a model's run."""
        return self.out / "runs" / job.name

    def evaluation(self, job: Job, method: str) -> Path:
        """The file of an evaluation."""
        folder = self.out / "evaluations" if job.tau is None else self.out / "sweep" / f"tau{job.tau:g}"
        return folder / f"{method}-seed{job.seed}.json"

    def evaluated(self, job: Job, method: str) -> Evaluation | None:
        """The evaluation of a finished model at all lengths and tokens of the plan; None if it must still be made.

        A damaged file counts as none: an evaluation can be made again.
        """
        run, path = self.run(job), self.evaluation(job, method)
        if not path.exists() or not finished(run):
            return None
        try:
            found = read_evaluation(path)
        except UnreadableFile:
            return None
        asked = lengths.parse(self.lengths, found.train_length)
        same = found.tokens == self.tokens and found.weights == weights_digest(run)
        return found if same and found.lengths.keys() >= asked.keys() else None

    def check_folder(self, corpus: str) -> None:
        """Raise ValueError if the folder holds a comparison with other settings or data: they would mix silently.

        Args:
            corpus: the SHA-256 of the data.
        """
        there: dict[Path, dict[str, Any]] = {}
        path = self.out / SUMMARY
        if path.exists():
            found = read_summary_if_any(path).settings
            before_orders = {"order": "sequential"} if "steps" in found else {}  # a comparison from before the choice
            there[path] = {**before_orders, **found}
        for path in sorted((self.out / "runs").glob(f"*/{CONFIG}")):
            try:
                config, values = read_config(path.parent)
            except ValueError as error:
                raise ValueError(f"{error}; delete {path.parent} to train it again") from error
            there[path] = {**training_settings(config), "corpus_sha256": values["corpus"].get("sha256")}
        wanted = {**training_settings(self.config(self.all_jobs()[0])), "corpus_sha256": corpus}
        for path, found in there.items():
            for name, value in wanted.items():
                if found.get(name) is not None and found[name] != value:
                    raise ValueError(
                        f"{path} is of a comparison with {name}={found[name]}, but {name}={value} is asked for: "
                        "choose another out"
                    )


@dataclasses.dataclass(frozen=True)
class Job:
    """One model to train, and the methods it serves."""

    model: str
    seed: int
    methods: tuple[str, ...]
    tau: float | None = None

    @property
    def name(self) -> str:
        lengthscale = "" if self.tau is None else f"-tau{self.tau:g}"
        return f"{self.model}{lengthscale}-seed{self.seed}"


def finished(run: Path) -> bool:
    """Whether a run has the weights of its last step."""
    return (run / CONFIG).exists() and weights_step(run) == read_config(run)[0].steps


def resumed(config: TrainConfig) -> TrainConfig:
    """The config that a run was begun with, in the folder of ``config`` and with its settings that may change."""
    there, _ = read_config(Path(config.out))
    changes = {name: getattr(config, name) for name, one in settings(TrainConfig).items() if one.resume}
    return dataclasses.replace(there, out=config.out, **changes)


def training_settings(config: TrainConfig) -> dict[str, Any]:
    """What all models share and their losses depend on, as JSON stores it; the data are named by their hash."""
    values = {**dataclasses.asdict(config.model), **dataclasses.asdict(config)}
    left_out = {"model", "vocab_size", "data", "val_data", "tokenizer", *OWN, *FREE}
    kept = {name: x for name, x in values.items() if name not in left_out and not name.startswith("val_")}
    rates = {name: kept.pop(f"lr_{name}") for name in ("matrices", "embedding", "output")}
    return json.loads(json.dumps({**kept, "learning_rates": rates}))
