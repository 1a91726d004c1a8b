"""Validation loss of a trained run at any context length, on the same tokens."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scaleinv import methods
from scaleinv.files import write_text
from scaleinv.lengths import parse
from scaleinv.progress import Report
from scaleinv.train.store import load_model, run_corpus, weights_digest
from scaleinv.train.validation import LengthLoss, loss_at_length, usable_tokens

TOKENS = 524_288
"""Validation tokens unless told otherwise: half a million give ±0.005 nats on English bytes."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A row's losses by length; lengths are labelled as they were asked for ("4x", or tokens)."""

    row: str
    seed: int
    model: str
    """The row the model was trained as."""
    train_length: int
    step: int | None
    """Of the checkpoint; None for the run's newest weights."""
    weights: str | None
    """SHA-256 of the run's newest weights; None for a checkpoint."""
    tokens: int
    """Held-out tokens asked for; windows × length is how many there were."""
    lengths: dict[str, LengthLoss]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def path(self, folder: Path) -> Path:
        """``<row>-seed<n>.json``, of a checkpoint ``<row>-seed<n>-step<n>.json``."""
        checkpoint = "" if self.step is None else f"-step{self.step}"
        return folder / f"{self.row}-seed{self.seed}{checkpoint}.json"

    def save(self, folder: Path) -> Path:
        """Write the file, or enter these lengths in it if it is of the same model."""
        folder.mkdir(parents=True, exist_ok=True)
        path = self.path(folder)
        values = self.to_json()
        earlier = json.loads(path.read_text()) if path.exists() else {}
        if all(earlier.get(name) == values[name] for name in values if name != "lengths"):
            values["lengths"] = {**earlier["lengths"], **values["lengths"]}
        write_text(path, json.dumps(values, indent=1))
        return path


def evaluate(
    run: Path | str,
    lengths: str = "1x,4x,16x",
    *,
    rows: Sequence[str] | None = None,
    tokens: int = TOKENS,
    step: int | None = None,
    device: str = "cpu",
    out: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Evaluation]:
    """Loss of a run by length, for the row it was trained as or for others that its model serves.

    Args:
        rows: for a RoPE-trained model also "rope+ntk" or "yarn"; None for its own.
        tokens: at most so many of the held-out tokens, rounded down so that every length divides them.
        step: a checkpoint by its step; None for the newest weights.
        out: a folder, where each row is saved as soon as it is done.
        progress: takes lines of text.
    """
    if tokens < 1:
        raise ValueError(f"tokens must be positive, got {tokens}")
    run = Path(run)
    model, config = load_model(run, device, step)
    weights = weights_digest(run) if step is None else None
    named = parse(lengths, config.model.train_length)
    data = run_corpus(config).val
    count = usable_tokens(data.total, tokens, list(named.values()))
    trained_as = methods.trained_as(config.model.method)
    results = []
    for row in rows or [config.model.method]:
        model.use_method(row)
        found = {}
        for label, length in named.items():

            def show(done: int, total: int, row: str = row, label: str = label) -> None:
                text = f"{row} at {label}: {done}/{total} windows"
                progress(Report(text, passing=True, kind="windows", method=row, length=label, done=done, total=total))

            found[label] = loss_at_length(
                model, data, length, count // length * length, document_masks=config.document_masks, progress=show
            )
            spread = found[label].stderr
            error = f" ± {spread:.4f}" if spread is not None else ""
            progress(f"{row} at {label} ({length:,} tokens): {found[label].mean:.4f}{error}")
        results.append(
            Evaluation(row, config.seed, trained_as, config.model.train_length, step, weights, tokens, found)
        )
        if out is not None:
            results[-1].save(out)
    return results
