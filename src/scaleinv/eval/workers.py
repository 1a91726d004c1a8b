"""Starts the workers of a comparison, reads their records, and stops them with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from typing import Any

from scaleinv.eval.work import Send, Work

COMMAND = (sys.executable, "-m", "scaleinv.eval.worker")


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

    def run(self, work: Work, receive: Send) -> None:
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


def _talk(process: subprocess.Popen[str], work: Work, receive: Send) -> str | None:
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
