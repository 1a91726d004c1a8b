"""`scaleinv adapt`: a pretrained model converted, trained on and compared, in every variant."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from scaleinv.adaptation import VARIANTS, AdaptConfig
from scaleinv.cli.common import command, device, text
from scaleinv.cli.options import add_options, given
from scaleinv.settings import Setting, settings

KNOWN = {**settings(AdaptConfig), "report": Setting("report", bool, default=True, help="write report.html")}

DETAIL = """If interrupted, rerun the same command to resume.

In the same --out you may add variants and seeds, and change --lengths, --val-tokens and how it is computed
(--micro-tokens, --gradient-checkpointing, --checkpoint-every, --device, ranks). Another model, --data, --val-data,
--train-length, --tokens, --batch-tokens, --lr, --lora, --precision or option of the group attention needs another
--out.

variants ("the trained stock model": stock is trained even if it is not asked for):
"""


def add(commands: Any) -> None:
    parser = command(
        commands,
        "adapt",
        run,
        "Adapt a pretrained Hugging Face model: train each variant, evaluate before and after, report, save.",
        "scaleinv adapt path/to/model --data books/ --tokens 50M --out runs/adapt",
        "scaleinv adapt HuggingFaceTB/SmolLM2-135M --variants stock,yarn,scale-invariant+yarn --train-length 2048",
        "torchrun --nproc-per-node 8 -m scaleinv adapt path/to/model --data books/ --fsdp --out runs/adapt",
        detail=DETAIL + "\n".join(f"  {name:<24}{variant.summary}" for name, variant in VARIANTS.items()),
    )
    add_options(parser, KNOWN, {})
    parser.usage = "%(prog)s MODEL [OPTION ...]"
    parser.add_argument("model", metavar="MODEL", type=text, help="a model's folder, or its id on the hub")


def run(options: argparse.Namespace) -> int:
    values = given(options, KNOWN)
    report = values.pop("report", True)
    config = AdaptConfig(model=options.model, **values)
    device(config.device)

    from scaleinv.hub import check_source

    check_source(config.model)  # first, because importing transformers takes seconds

    import os
    import shlex
    from pathlib import Path

    from scaleinv.plots import style

    if report:
        style.require()

    from transformers.utils import logging

    from scaleinv.eval.summary import SUMMARY, read_summary
    from scaleinv.hf.adapt import adapt
    from scaleinv.progress import Terminal
    from scaleinv.reports.comparison import terminal_table, write_report

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    summary = adapt(config, Terminal(every=30), shlex.join(["scaleinv", *sys.argv[1:]]))
    if os.environ.get("RANK", "0") != "0":
        return 0
    before = read_summary(Path(config.out) / "before" / SUMMARY)
    print(f"before training\n{terminal_table(before)}\n\nafter training\n{terminal_table(summary)}")
    if report:
        write_report(Path(config.out) / "before")
        print(f"report: {write_report(Path(config.out)).resolve()}")
    return 0
