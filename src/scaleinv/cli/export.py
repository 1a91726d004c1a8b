"""`scaleinv export`: a run as a Hugging Face folder."""

from __future__ import annotations

import argparse
from typing import Any

from scaleinv.cli.common import command, path


def add(commands: Any) -> None:
    parser = command(
        commands,
        "export",
        run,
        "Write a run as a Hugging Face folder for AutoModelForCausalLM and AutoTokenizer.",
        "scaleinv export runs/si --out hf-dir",
    )
    parser.add_argument("run_folder", metavar="RUN", type=path, help="a run's folder")
    parser.add_argument("--out", required=True, type=path, help="a new folder")


def run(options: argparse.Namespace) -> None:
    from scaleinv import hf

    print(f"wrote {hf.export(options.run_folder, options.out)}: load it after `import scaleinv.hf`")
