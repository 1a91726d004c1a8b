"""Kill training, comparisons and needle tests at random moments, and compare what they leave with undisturbed ones.

    python benchmarks/soak.py --kills 100

Each task first runs undisturbed. Then it runs again in another folder and is killed (SIGKILL) at random moments, half
of them while a checkpoint or another file is being written, and the same command resumes it until it ends. Then
weights, the last checkpoint's tensors, metrics and results must be equal bit by bit, with nothing left half written.
The next round begins with an empty folder, until all kills are done.

Writes soak.json and README.md to results/reliability/; the exit code is 1 if anything differed. Linux only.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # before torch: processes are forked from this one

import argparse
import collections
import dataclasses
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.utils.tensorboard
from safetensors.torch import load_file

import scaleinv.reports.comparison  # noqa: F401
from scaleinv.cli.program import run as command
from scaleinv.eval.needle import run_needle
from scaleinv.eval.needle_task import NeedleTask
from scaleinv.eval.needle_train import NeedleTraining
from scaleinv.files import read_lines, write_json, write_text
from scaleinv.machine import cpu_name
from scaleinv.train.store import tensor_hash
from scaleinv.version import VERSION

SMALL = "--train-length 32 --layers 1 --width 32 --batch-tokens 128 --val-tokens 512 --device cpu --checkpoint-every 2"
NEEDLES = NeedleTask(needles=1, digits=1, cities=3, length=96, needle=" {city} is {number}.", question="\n")
FINETUNING = NeedleTraining(steps=24, warmup=4, decay=8, sequences=2, checkpoint_every=2, log_every=1)
LIMIT = 300.0
"""Seconds that an attempt may take."""
HALF_WRITTEN = re.compile(r"\.partial-.*|\.[0-9a-f]{32}\..+")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/reliability"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = random.Random(options.seed)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="scaleinv-soak-") as scratch:
        os.environ["XDG_CACHE_HOME"] = f"{scratch}/cache"
        results = [
            soak(task, max(1, round(options.kills * share)), Path(scratch), chosen)
            for task, share in tasks(Path(scratch))
        ]
    write(options.out, options.seed, results, time.monotonic() - began)
    return 0 if all(result.faults == [] for result in results) else 1


@dataclasses.dataclass(frozen=True)
class Task:
    """Something to interrupt: ``run`` does it, or what is left of it, in a folder, and returns the exit code."""

    name: str
    run: Callable[[Path], int]
    shared: tuple[str, ...] = ()
    """Folders that several processes may write to at once, and which nobody clears of what a killed one left."""


def tasks(scratch: Path) -> Iterator[tuple[Task, float]]:
    """The tasks, each with its share of the kills: the workers of a comparison take seconds to start."""
    books = scratch / "books"
    books.mkdir()
    for number in range(12):
        text = "".join(f"{number} times {line} makes {number * line}, said the fox.\n" for line in range(40))
        (books / f"{number}.txt").write_text(text)

    def train(folder: Path) -> int:
        if (folder / "config.json").exists():
            return command(["train", "--resume", str(folder)])
        return command(["train", *SMALL.split(), "--steps", "40", "--data", str(books), "--out", str(folder)])

    def compare(folder: Path) -> int:
        chosen = (
            "--methods rope,yarn,scale-invariant-p-rope --seeds 1 --lengths 1x,2x --tokens 512 --jobs 2 --no-report"
        )
        settings = [*SMALL.split(), "--steps", "30", "--data", str(books)]
        return command(["compare", *chosen.split(), *settings, "--out", str(folder)])

    def needle(folder: Path) -> int:
        run_needle(trained, "1x,2x", folder, task=NEEDLES, training=FINETUNING, samples=4, device="cpu")
        return 0

    yield Task("train", train), 0.45
    trained = scratch / "train" / "undisturbed"
    yield Task("needle", needle, shared=(".", "needle")), 0.35
    yield Task("compare", compare), 0.2


@dataclasses.dataclass
class Result:
    """What became of a task."""

    task: str
    kills: int = 0
    moments: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    killed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Which processes: the whole task, its parent or one of its workers."""
    rounds: int = 0
    """How often the task was brought to its end and compared."""
    refused: int = 0
    """Attempts turned away because a worker of the killed parent was still there."""
    faults: list[str] = dataclasses.field(default_factory=list)


def soak(task: Task, kills: int, scratch: Path, chosen: random.Random) -> Result:
    """Run a task undisturbed, then kill and resume it, and compare."""
    wanted, seconds = undisturbed(task, scratch / task.name / "undisturbed")
    say(f"{task.name}: {seconds:.1f} s undisturbed, {kills} kills to come")
    result = Result(task.name)
    while result.kills < kills:
        folder = scratch / task.name / "disturbed"
        finish(task, folder, kills, seconds, chosen, result)
        found = {name: value for name, value in state(folder).items() if not tolerated(name, task)}
        for name in sorted(wanted.keys() | found.keys()):
            if wanted.get(name) != found.get(name):
                fault = "is missing" if name not in found else "is left over" if name not in wanted else "differs"
                result.faults.append(f"round {result.rounds + 1}: {name} {fault}")
        result.rounds += 1
        outcome = "equal" if not result.faults else f"NOT equal: {'; '.join(result.faults)}"
        say(f"{task.name}: round {result.rounds} ended after {result.kills} kills in all: {outcome}")
        if result.faults:
            break
        shutil.rmtree(folder)
    return result


def undisturbed(task: Task, folder: Path) -> tuple[dict[str, str], float]:
    """What a task makes when nobody kills it, and how long that takes when its caches are filled."""
    for _ in range(2):
        shutil.rmtree(folder, ignore_errors=True)
        began = time.monotonic()
        process = start(task, folder)
        code, text = end(process, folder)
        if code != 0:
            raise SystemExit(f"{task.name} failed undisturbed: {text}")
    return state(folder), time.monotonic() - began


def finish(task: Task, folder: Path, kills: int, seconds: float, chosen: random.Random, result: Result) -> None:
    """Bring a task to its end, and kill it on the way as long as there are kills left."""
    while True:
        process = start(task, folder)
        victim = None
        if result.kills < kills:
            moment = chosen.uniform(0, seconds) if chosen.random() < 0.5 else None
            victim = kill(process, folder, moment, chosen, task.name == "compare")
        code, text = end(process, folder)
        if victim is not None:
            result.kills += 1
            result.killed[victim] += 1
            where = where_it_fell(folder)
            result.moments[where] += 1
            say(f"{task.name}: kill {result.kills}/{kills} of the {victim}, {where} (step {reached(folder)})")
        elif code == 0:
            return
        elif "is in use by" in text:
            result.refused += 1
            time.sleep(0.2)
        else:
            raise SystemExit(f"{task.name} ended with exit code {code}: {text}")


def start(task: Task, folder: Path) -> int:
    """Start a task in a process of its own, forked from this one: importing torch anew would take seconds."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.setsid()
        output = os.open(log(folder), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = task.run(folder)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        os._exit(code)


def log(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")


def end(process: int, folder: Path) -> tuple[int, str]:
    """Wait for a process; its exit code, and the last line that it printed."""
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status), log(folder).read_text(errors="replace").strip()[-400:]
        time.sleep(0.005)
    raise SystemExit(f"no end after {LIMIT:g} s: {folder}")


def kill(process: int, folder: Path, moment: float | None, chosen: random.Random, workers: bool) -> str | None:
    """Kill at a moment, or while something is being written where that is None; None if the task ended before.

    Returns what was killed. A comparison loses all of its processes, its parent alone or a worker alone.
    """
    until = time.monotonic() + (LIMIT if moment is None else moment)
    skipped = chosen.randrange(8)  # writes that are let through
    seen: set[str] = set()
    while time.monotonic() < until:
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return None
        if moment is None:
            seen.update(map(str, half_written(folder)))
            if len(seen) > skipped:
                time.sleep(chosen.uniform(0, 0.03))
                break
        time.sleep(0.001)
    children = children_of(process) if workers else []
    victim = chosen.choice(["task", "parent", "worker"]) if children else "task"
    doomed = {"task": [process, *children], "parent": [process], "worker": children[:1]}[victim]
    if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
        return None
    for number in doomed:
        try:
            os.kill(number, signal.SIGKILL)
        except ProcessLookupError:  # a worker that ended by itself
            if victim == "worker":
                return None
    return victim


def children_of(process: int) -> list[int]:
    found = []
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            found += [int(word) for word in thread.read_text().split()]
        except OSError:  # it has ended
            continue
    return found


def half_written(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(".*") if HALF_WRITTEN.fullmatch(path.name)]


def where_it_fell(folder: Path) -> str:
    """What a killed task was doing, by what it left."""
    names = [path.name for path in half_written(folder)]
    if any(name.startswith(".partial-") for name in names):
        return "in a checkpoint's write"
    if names:
        return "in another file's write"
    return "between writes" if any(folder.rglob("config.json")) else "before the first file"


def reached(folder: Path) -> int:
    """The last step of any metrics."""
    lines = [line for path in folder.rglob("metrics.jsonl") for line in path.read_text().splitlines()]
    return max((int(found[1]) for line in lines if (found := re.match(r'\{"step": (\d+)', line))), default=0)


def state(folder: Path) -> dict[str, str]:
    """Everything that a task left, by file: tensors by their hash, metrics without times; no TensorBoard files."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not path.is_file() or path.parent.name == "tensorboard":
            continue
        if path.suffix == ".safetensors":
            found[name] = tensor_hash(load_file(path))
        elif path.suffix == ".jsonl":
            found[name] = json.dumps([without_times(line) for line in read_lines(path)])
        elif path.suffix == ".json":
            found[name] = json.dumps(without_times(json.loads(path.read_text()))).replace(str(folder), "")
        else:
            found[name] = path.read_bytes().hex()
    return found


def tolerated(name: str, task: Task) -> bool:
    path = Path(name)
    return HALF_WRITTEN.fullmatch(path.name) is not None and str(path.parent) in task.shared


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """Speeds differ, and so do the hashes of a checkpoint's files: torch writes their tensors in any order."""
    return {name: value for name, value in record.items() if name not in ("tokens_per_second", "files")}


def write(out: Path, seed: int, results: list[Result], seconds: float) -> None:
    kills = sum(result.kills for result in results)
    line = f"python benchmarks/soak.py --kills {kills} --seed {seed}"
    held = all(not result.faults for result in results)
    versions = {"scaleinv": VERSION, "torch": torch.__version__, "python": sys.version.split()[0]}
    about = {"command": line, "kills": kills, "equal": held, "minutes": round(seconds / 60, 1), "cpu": cpu_name()}
    write_json(out / "soak.json", {**about, **versions, "tasks": [vars(result) for result in results]})
    moments = sorted({moment for result in results for moment in result.moments})
    rows = [["task", "kills", *moments, "rounds compared", "outcome"]]
    for result in results:
        outcome = "equal" if not result.faults else "; ".join(result.faults)
        counts = [result.kills, *(result.moments[moment] for moment in moments), result.rounds]
        rows.append([result.task, *map(str, counts), outcome])
    table = ["| " + " | ".join(row) + " |" for row in rows]
    table.insert(1, "|" + " --- |" * len(rows[0]))
    workers = results[-1].killed
    text = (
        f"# Kills\n\n`make soak` (`{line}`): {kills} times SIGKILL, then the same command again, in "
        f"{seconds / 60:.0f} minutes.\n\n" + "\n".join(table) + "\n\n"
        "A round ends when the task has ended. Then weights, the tensors of the last checkpoint (optimiser and random "
        "state included), metrics and results are compared with those of an undisturbed run: equal means bit by bit, "
        "with no file missing or left over. Left out are speeds, TensorBoard files, and half-written files in a folder "
        "of needle results, which other processes may be writing to. Half of the kills wait until a file is being "
        "written.\n\n"
        f"In comparisons the kill took the whole task {workers['task']} times, the parent alone {workers['parent']} "
        f"and a worker alone {workers['worker']}.\n"
    )
    write_text(out / "README.md", text)
    say(f"{kills} kills, {'all equal' if held else 'NOT equal'}; wrote {out / 'soak.json'}")


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
