"""`scaleinv report`: the page of a comparison."""

from __future__ import annotations

import argparse
from typing import Any

from scaleinv.cli.common import command, path


def add(commands: Any) -> None:
    parser = command(
        commands,
        "report",
        run,
        "Write report.html, figures and tables of a comparison.",
        "scaleinv report results/mini",
        "scaleinv report runs/adapt --base yarn",
    )
    parser.add_argument("folder", metavar="DIR", type=path, help="what `scaleinv compare` or `scaleinv adapt` wrote")
    parser.add_argument(
        "--base",
        metavar="METHOD",
        help="whose loss the others' differences are to; default: scale-invariant-p-rope, or stock after `adapt`",
    )


def run(options: argparse.Namespace) -> None:
    from scaleinv.progress import terminal
    from scaleinv.reports.comparison import write_report

    print(write_report(options.folder, base=options.base, progress=terminal).resolve())
