"""Analysis and Hugging Face."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from scaleinv.cli.common import command


def _add_analyze(commands: Any) -> None:
    parser = command(
        commands,
        "analyze",
        _analyze,
        "Is attention scale-invariant? In theory, and inside a model.",
        "scaleinv analyze theory --out figures/\n"
        "  scaleinv analyze model runs/si --lengths 1x,4x,16x\n"
        "  scaleinv analyze model path/to/hf-model --text book.txt",
    )
    add = parser.add_argument
    add("what", choices=("theory", "model"), help="Gaussian logits, or a trained model")
    add("path", nargs="?", help="with model: a run's folder, or a Hugging Face model's folder or id")
    add("--lengths", help="context lengths; default: 1x,4x,16x")
    add("--text", type=Path, help="text to run the model on; default: the run's validation data")
    add("--out", type=Path, default=Path("figures"), help="folder for figures and data; default: figures")


def _analyze(options: argparse.Namespace) -> None:
    from scaleinv import analysis
    from scaleinv.train.logs import terminal

    if options.what == "theory":
        written = analysis.theory_report(options.out, progress=terminal)
    elif options.path is None:
        raise ValueError("analyze model needs a PATH: a run's folder, or a Hugging Face model's")
    else:
        lengths = {"lengths": options.lengths.split(",")} if options.lengths else {}
        written = analysis.analyze_model(options.path, text=options.text, out=options.out, progress=terminal, **lengths)
    for path in written:
        print(path)


def _add_convert(commands: Any) -> None:
    parser = command(
        commands,
        "convert",
        _convert,
        "Make a Hugging Face model scale-invariant; continue its training to let it adapt.",
        "scaleinv convert DIR --tau 10 --p 0.5 --out DIR2",
    )
    add = parser.add_argument
    add("source", metavar="DIR", help="a model's folder, or its id on the hub")
    add("--out", required=True, type=Path, help="a new folder")
    add("--tau", type=float, default=10.0, help="lengthscale in tokens; default: 10")
    add("--p", type=float, default=0.5, help="share of the rotary's channel pairs that go on turning; default: 0.5")
    add("--keep-rotary", action="store_true", help="leave the rotary as it is")


def _convert(options: argparse.Namespace) -> None:
    from scaleinv import hf

    hf.convert_folder(options.source, options.out, tau=options.tau, p=None if options.keep_rotary else options.p)
    print(f"wrote {options.out}: load it after `import scaleinv.hf`")


def _add_export(commands: Any) -> None:
    parser = command(
        commands,
        "export",
        _export,
        "Write a run as a Hugging Face folder for AutoModelForCausalLM and AutoTokenizer.",
        "scaleinv export runs/si --out hf-dir",
    )
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="a run's folder")
    parser.add_argument("--out", required=True, type=Path, help="a new folder")


def _export(options: argparse.Namespace) -> None:
    from scaleinv import hf

    print(f"wrote {hf.export(options.run_folder, options.out)}: load it after `import scaleinv.hf`")


COMMANDS = [_add_analyze, _add_convert, _add_export]
