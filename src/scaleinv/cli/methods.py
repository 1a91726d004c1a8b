"""`scaleinv methods`: the names of the methods."""

from __future__ import annotations

import argparse
from typing import Any

from scaleinv.cli.common import command


def add(commands: Any) -> None:
    command(
        commands, "methods", run, "List all methods: those of the paper's table, and five more.", "scaleinv methods"
    )


def run(options: argparse.Namespace) -> None:
    from scaleinv import methods

    for name in methods.names():
        row = methods.row(name)
        note = f"the {row.trained_as} model, {row.stretch} at inference" if row.stretch else ""
        kind = "infini-attention" if row.infini else row.logits
        print(f"{name:27}{row.rotary:8}{kind:18}{note}".rstrip())
