"""Many models at once, each in a process of its own: starts the workers, reads their records, and stops them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from scaleinv.eval.board import Board, ToDo
from scaleinv.eval.work import NeedleWork, Send, Work
from scaleinv.machine import find_device
from scaleinv.progress import Progress

COMMAND = (sys.executable, "-m", "scaleinv.eval.worker")


class Stopped(RuntimeError):
    """A signal ended the work; what is finished is kept."""

    def __init__(self, number: int, out: Path) -> None:
        super().__init__(f"stopped; run the same command again to resume {out}")
        self.signal = number


def jobs_at_once(asked: int | None, models: int, device: str) -> int:
    """How many processes to run: those asked for, or one per core (one on a GPU); never more than models."""
    usual = (os.cpu_count() or 1) if find_device(device).type == "cpu" else 1
    return min(asked or usual, models)


def work_through(
    models: Mapping[str, ToDo],
    work: Callable[[str], Work | NeedleWork | None],
    *,
    count: int,
    out: Path,
    progress: Progress,
    done: Callable[[], object],
) -> None:
    """Do the work of every model, several at once. If any fail, the others still run, and RuntimeError names them all.

    Args:
        models: what each model has to do, by its name: for the time left.
        work: what is left to do for a model; None if nothing is.
        count: processes at once; they share the cores.
        out: the folder, for the message of `Stopped`.
        done: called after each model.
    """
    board = Board(models, progress)
    finished = {name for name in models if work(name) is None}
    for name in finished:  # first, so that they do not count towards the time left
        board.finish(name)
    workers = Workers(threads=max(1, (os.cpu_count() or 1) // count))
    problems = []

    def do(name: str) -> None:
        left = work(name)
        if left is not None:
            workers.run(left, lambda record: board.receive(name, record))

    with workers, ThreadPoolExecutor(count) as pool:
        pending = {pool.submit(do, name): name for name in models if name not in finished}
        for future in as_completed(pending):
            name, error = pending[future], future.exception()
            if workers.stopped:
                continue
            if error is not None:
                problems.append(f"{name}: {error}")
                board.fail(name, str(error))
            else:
                board.finish(name)
                done()
    board.close()
    if workers.stopped:
        raise Stopped(workers.stopped, out)
    if problems:
        raise RuntimeError("some models failed: " + "; ".join(problems))


class Workers:
    """Processes that a signal in the ``with`` block stops: each saves and leaves.

    Args:
        threads: of each process.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.lock = threading.Lock()
        self.running: set[subprocess.Popen[str]] = set()
        self.stopped = 0
        """The number of the signal that stopped them; 0 if none did."""

    def __enter__(self) -> Workers:
        self.handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.handlers[number] = signal.signal(number, self.stop)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def stop(self, number: int, frame: object) -> None:
        """Tell every process to save and leave."""
        self.stopped = number
        for process in list(self.running):
            process.terminate()

    def run(self, work: Work | NeedleWork, receive: Send) -> None:
        """Do the work in a process of its own; RuntimeError with its message if it fails."""
        if self.stopped:
            raise RuntimeError("stopped")
        threads = {name: str(self.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
            process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                text=True,
                encoding="utf-8",
                env={**os.environ, **threads},
                start_new_session=True,  # Ctrl-C reaches only this process, which tells the others
            )
            with self.lock:
                self.running.add(process)
            if self.stopped:  # since the check above
                process.terminate()
            message = _talk(process, work, receive)
            code = process.wait()
            with self.lock:
                self.running.discard(process)
            if code:
                printed.seek(0)
                last = printed.read().strip().rpartition("\n")[2]
                raise RuntimeError(message or last or f"exit code {code}")


def _talk(process: subprocess.Popen[str], work: Work | NeedleWork, receive: Send) -> str | None:
    """Give a process its work and receive its records until it ends; returns the message of its error, if any."""
    assert process.stdin is not None
    assert process.stdout is not None
    message = None
    try:
        process.stdin.write(work.to_json())
        process.stdin.close()
    except BrokenPipeError:  # it ended before it read: its exit code says so
        pass
    for line in process.stdout:
        record = json.loads(line)
        if record["kind"] == "error":
            message = record["message"]
        else:
            receive(record)
    return message
