"""A worker: trains and evaluates a model, or asks it for needles, in a process of its own.

``python -m scaleinv.eval.worker`` reads its work as JSON from its standard input, and writes records to its standard
output, one JSON object per line: ``{"kind": "step", "step": 10, "steps": 400, "loss": 2.1, …}``. The kinds are those of
`scaleinv.progress.Report`, "line" for any other line of progress, and "error" with a "message". What else is printed
goes to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from scaleinv.eval.loss import evaluate
from scaleinv.eval.needle import run_needle
from scaleinv.eval.work import NeedleWork, Send, Work, read_work
from scaleinv.progress import Report
from scaleinv.train import run

MISTAKES = (ValueError, TypeError, RuntimeError, OSError, ImportError)
"""Errors whose message says enough; others come with their traceback."""


def do(work: Work | NeedleWork, send: Send) -> int:
    """Do the work; returns the exit code, 128 + n if signal n ended it."""

    def progress(line: str) -> None:
        send(line.record if isinstance(line, Report) else {"kind": "line", "text": line})

    if isinstance(work, NeedleWork):
        given = {field.name: getattr(work, field.name) for field in dataclasses.fields(work)}
        run_needle(**given | {"out": Path(work.out)}, summary=False, progress=progress)
        return 0
    if work.train is not None:
        result = run(work.train, resume=work.resume, progress=progress)
        if not result.finished:
            return 128 + (result.signal or 15)
    if work.methods:
        evaluate(
            work.run,
            work.lengths,
            methods=work.methods,
            tokens=work.tokens,
            device=work.device,
            out=Path(work.out),
            progress=progress,
        )
    return 0


def main() -> int:
    # Standard output is for the records alone: what a library prints goes to standard error.
    records = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(record: dict[str, Any]) -> None:
        records.write(json.dumps(record) + "\n")
        records.flush()  # BrokenPipeError if the comparison is gone: then this ends too

    try:
        return do(read_work(sys.stdin.read()), send)
    except BrokenPipeError:
        return 1
    except MISTAKES as error:
        send({"kind": "error", "message": str(error)})
        return 2


if __name__ == "__main__":
    sys.exit(main())
