"""`scaleinv doctor`: what works on this machine, and how fast."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from scaleinv.cli.common import Parser, add_device, command, device, text


def add(commands: Any) -> None:
    parser: Parser = command(
        commands,
        "doctor",
        run,
        "Check every backend on this machine: can it serve, is it right, how fast is it.",
        "scaleinv doctor",
        "scaleinv doctor --quick --json",
        "scaleinv doctor --aot sm_80,sm_90",
        detail="The exit code is 1 where something is wrong. The text is made to be pasted into an issue.",
    )
    add_device(parser)
    parser.add_argument("--quick", action="store_true", help="fewer timings and head dimensions: under a minute")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--aot",
        type=text,
        metavar="TARGETS",
        help="instead, compile the Triton kernels for these GPUs (sm_80, sm_90, sm_120, gfx942, with commas between "
        "them) and print registers, spilled bytes, shared memory and the main loop's instructions; needs no GPU",
    )


def run(options: argparse.Namespace) -> int:
    return compile_ahead(options) if options.aot else examine(options)


def examine(options: argparse.Namespace) -> int:
    found_device = device(options.device)
    import torch

    from scaleinv import doctor

    report = doctor.examine(torch.device(found_device), options.quick, lambda line: print(line, file=sys.stderr))
    if options.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        print("```", *report.lines(), "```", sep="\n")
    return 1 if report.wrong else 0


def compile_ahead(options: argparse.Namespace) -> int:
    from scaleinv.doctor import ahead_of_time

    wrong = False
    rows = []
    for row in ahead_of_time([word.strip() for word in options.aot.split(",")]):
        wrong |= bool(row["faults"])
        rows.append(row)
        lines = [row.pop("line"), *(f"  WRONG: {fault}" for fault in row["faults"])]
        print(*lines, sep="\n", flush=True, file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps(rows, indent=2))
    return 1 if wrong else 0
