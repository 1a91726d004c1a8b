"""`scaleinv compare`: train, evaluate and report several methods."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from scaleinv.cli.common import command, device, length_labels, method_names
from scaleinv.cli.options import RUN, add_options, given
from scaleinv.settings import Setting

_OWN = (
    Setting("out", str, help="folder for runs, evaluations, summary.json and the report; required", metavar="DIR"),
    Setting("methods", str, default="all", help="comma-separated methods, or all", several=True),
    Setting("seeds", int, default=3, least=1, most=10_000, help="models of each method, with seeds 0, 1, …"),
    Setting("lengths", str, default="1x,4x,16x", help="context lengths to evaluate at, 4x or 2048", several=True),
    Setting("tokens", int, unset="524,288", least=1, help="validation tokens"),
    Setting("sweep", str, unset="none", metavar="tau=X,…", help="also train the method with these lengthscales"),
    Setting("jobs", int, unset="one per core, or one on a GPU", least=1, help="processes at once"),
    Setting("report", bool, default=True, help="write report.html"),
)
_CHOSEN = ("method", "seed", "tau")
"""Settings of a training run that the comparison chooses for each model."""
KNOWN = {name: one for name, one in RUN.items() if name not in _CHOSEN} | {setting.name: setting for setting in _OWN}
"""The settings of a comparison: its own, and those of every training run."""


def add(commands: Any) -> None:
    parser = command(
        commands,
        "compare",
        run,
        "Train every method, evaluate it at every length and report. If interrupted, rerun the same command to resume.",
        "scaleinv compare --preset mini --methods all --seeds 3 --out results/new",
        "scaleinv compare --methods rope,alibi --steps 400 --lr-matrices 0.01 --out results/slow",
        "scaleinv compare --config compare.toml --out results/again",
    )
    add_options(parser, KNOWN, {"data": "sotu", "keep": "1", "val_lengths": "none"})


def run(options: argparse.Namespace) -> int:
    values = given(options, KNOWN)
    if "out" not in values:
        raise ValueError("compare needs --out DIR")
    names = values.pop("methods", "all")
    plan: dict[str, Any] = {"methods": [names] if names == "all" else method_names(names)}
    plan["lengths"] = length_labels(values.pop("lengths", "1x,4x,16x"))
    plan["tau"] = _sweep(values.pop("sweep", None))
    plan |= {name: values.pop(name) for name in ("out", "preset", "seeds", "tokens", "jobs") if name in values}
    device(values.get("device", "auto"))
    report = values.pop("report", True)

    import shlex

    from scaleinv.eval.compare import Comparison, compare
    from scaleinv.eval.workers import Stopped
    from scaleinv.plots import style
    from scaleinv.progress import Terminal
    from scaleinv.reports.comparison import terminal_table, write_report

    if report:
        style.require()
    command = shlex.join(["scaleinv", *sys.argv[1:]])
    try:
        summary = compare(Comparison(**plan, train=values, command=command), Terminal(every=30))
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return 128 + stopped.signal
    print(terminal_table(summary))
    if report:
        print(f"report: {write_report(plan['out']).resolve()}")
    return 0


def _sweep(text: str | None) -> list[float]:
    if text is None:
        return []
    tau = dataclasses.replace(RUN["tau"], items=0)
    name, _, values = text.partition("=")
    if name != "tau":
        raise ValueError(f"sweep must read like tau=0.1,1,10, got {text!r}")
    try:
        return list(tau.parse(values))
    except ValueError as error:
        raise ValueError(f"sweep: tau {error}") from None
