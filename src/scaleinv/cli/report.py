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
    )
    parser.add_argument("folder", metavar="DIR", type=path, help="what `scaleinv compare` wrote")


def run(options: argparse.Namespace) -> None:
    from scaleinv.progress import terminal
    from scaleinv.reports.comparison import write_report

    print(write_report(options.folder, progress=terminal).resolve())
