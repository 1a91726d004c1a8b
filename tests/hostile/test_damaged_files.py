"""Damaged files: each ends in the right result, or in one line that names the file; nothing else is touched.

Every file that the program reads is tried with a list of damage and with damage that Hypothesis draws: a few cases by
default, more than a thousand with ``pytest -m exhaustive tests/hostile``. HYPOTHESIS_PROFILE=default draws new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest
from damage import EDGES, Damage, damages
from hypothesis import HealthCheck, given, settings
from world import COMPARE, NEEDLE, TINY, World, assert_clear, changed, outcome, tree

from scaleinv.analysis.calibrate import Calibration
from scaleinv.analysis.model import ModelStatistics
from scaleinv.plots.chart import Chart
from scaleinv.plots.needle import HeatMap

pytestmark = pytest.mark.slow

COUNTS = (pytest.param(4, id="few"), pytest.param(40, id="many", marks=pytest.mark.exhaustive))

GENERATE = "generate {} --tokens 4 --temperature 0 --prompt fox"
EVALUATE = "evaluate run --lengths 1x --tokens 384"
TRAIN = f"train {TINY} --steps 1 --out new --data"
RUN = ("run/*", "cache/scaleinv/data/scans/*")
NEW = ("new", "new/*", "cache/scaleinv/data/scans/*")
CACHE = ("cache/scaleinv/data*",)


@dataclass(frozen=True)
class Reader:
    """A command that reads a file.

    ``writes`` are the files that it may write, ``names`` what else than the file its message may name, and ``exact``
    says that it prints the same as without damage if it ends well: the file has a hash, or can be made again.
    """

    file: str
    command: str | Callable[[], object]
    writes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    exact: bool = False
    id: str = ""

    def __str__(self) -> str:
        command = self.command.split()[0] if isinstance(self.command, str) else "load"
        return self.id or f"{self.file.replace('*', '')}-{command}"


READERS = (
    Reader("run/config.json", GENERATE.format("run")),
    Reader("run/config.json", EVALUATE, (*RUN, *CACHE), names=("data ",)),
    Reader("run/config.json", "train --resume run --steps 3", (*RUN, *CACHE), names=("data ",)),
    Reader("run/config.json", f"{TRAIN} books --config run/config.json", (*NEW, *CACHE), id="config.json-train-config"),
    Reader("run/metrics.jsonl", "train --resume run --steps 3", RUN),
    Reader("run/model.safetensors", GENERATE.format("run"), exact=True),
    Reader("run/model.safetensors", "train --resume run", RUN, exact=True),
    Reader("run/tokenizer/tokenizer.json", GENERATE.format("run"), exact=True),
    Reader("bpe/tokenizer/bpe.json", GENERATE.format("bpe")),
    Reader("run/checkpoints/step-000002/manifest.json", "train --resume run --steps 3", RUN),
    Reader("run/checkpoints/step-000002/model-*.safetensors", "train --resume run --steps 3", RUN),
    Reader("run/checkpoints/step-000002/model.safetensors.index.json", f"{EVALUATE} --step 2", RUN, exact=True),
    Reader("run/checkpoints/step-000002/manifest.json", f"{EVALUATE} --step 2", RUN, exact=True),
    Reader("run/checkpoints/step-000002/model-*.safetensors", f"{EVALUATE} --step 2", RUN, exact=True),
    Reader("run/evaluations/rope-seed0.json", EVALUATE, RUN, exact=True),
    Reader("cache/scaleinv/data/*/meta.json", EVALUATE, (*RUN, *CACHE), exact=True),
    Reader("cache/scaleinv/data/*/*_val_*.bin", EVALUATE, (*RUN, *CACHE), exact=True),
    Reader("cache/scaleinv/data/*/tokenizer.json", EVALUATE, (*RUN, *CACHE), exact=True),
    Reader("cache/scaleinv/data/scans/*.json", EVALUATE, (*RUN, *CACHE), exact=True),
    Reader("shards/*_train_*.bin", f"{TRAIN} shards/*.bin", NEW, names=("data ",)),
    Reader("shards/tokenizer.json", f"{TRAIN} shards/*.bin", NEW),
    Reader("books/003.txt", f"{TRAIN} books", (*NEW, *CACHE)),
    Reader("run.toml", f"{TRAIN} books --config run.toml", (*NEW, *CACHE)),
    Reader("results/summary.json", COMPARE, ("results/*", *CACHE)),
    Reader("results/sweep.json", COMPARE, ("results/*", *CACHE)),
    Reader("results/evaluations/rope-seed0.json", COMPARE, ("results/*", *CACHE)),
    Reader("results/runs/rope-seed0/config.json", COMPARE, ("results/*", *CACHE)),
    Reader("results/runs/rope-seed0/model.safetensors", COMPARE, ("results/*", *CACHE)),
    Reader("results/summary.json", "report results", ("results/*",)),
    Reader("results/sweep.json", "report results", ("results/*",)),
    Reader("results/evaluations/rope-seed0.json", "report results", ("results/*",)),
    Reader("results/curves/rope-seed0.jsonl", "report results", ("results/*",)),
    Reader("results/needle/rope-seed0.json", "report results", ("results/*",)),
    Reader("results/needle/rope-seed0.json", NEEDLE, ("results/*",)),
    Reader("results/needle/rope-seed0.jsonl", NEEDLE, ("results/*",)),
    Reader("results/needle/models/rope-seed0/needle.json", NEEDLE, ("results/*",)),
    Reader("results/needle/models/rope-seed0/model.safetensors", NEEDLE, ("results/*",), exact=True),
    Reader("calibration.json", lambda: Calibration.load("calibration.json")),
    Reader("statistics/attention.json", lambda: ModelStatistics.load(Path("statistics"))),
)


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """Figures are drawn from what was read: they take seconds, and other tests draw them."""
    for kind in (Chart, HeatMap):
        monkeypatch.setattr(kind, "save", lambda *_: [])


def try_damage(world: World, reader: Reader, damage: Damage, usual: str) -> None:
    world.reset()
    (path, *_) = sorted(world.here.glob(reader.file))
    damage.do(path)
    before = tree(world.here)
    found = outcome(reader.command)
    keys = {damage.key, damage.key.replace("_", "-")} - {""}
    folder = path.parent.relative_to(world.here)
    assert_clear(found, path.name, f"{folder}: ", f"{folder} ", *keys, *reader.names)
    touched = {name for name in changed(before, tree(world.here)) if "tensorboard" not in name}
    strange = {name for name in touched if not any(fnmatch(name, pattern) for pattern in reader.writes)}
    assert not strange
    if reader.exact and found.code == 0:
        assert found.out == usual


@pytest.fixture
def usual(world, reader) -> str:
    """What the command prints without damage."""
    found = outcome(reader.command, limit=120)
    assert found.code == 0, found.err
    return found.out


@pytest.mark.parametrize("reader", READERS, ids=str)
@pytest.mark.parametrize("edges", [pytest.param(4, id="few"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)])
def test_files_that_are_something_else(reader, edges, world, usual):
    for damage in EDGES[READERS.index(reader) % edges :: edges]:
        try:
            try_damage(world, reader, damage, usual)
        except BaseException as error:
            error.add_note(f"{reader.file}: {damage}")
            raise


@pytest.mark.parametrize("reader", READERS, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_drawn_damage(reader, count, world, usual):
    (path, *_) = sorted(world.pristine.glob(reader.file))

    @settings(max_examples=count, suppress_health_check=list(HealthCheck))
    @given(damages(path))
    def check(damage: Damage) -> None:
        try_damage(world, reader, damage, usual)

    check()
