"""Validation loss of a trained run at any context length, on the same tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scaleinv.data import TokenData
from scaleinv.eval.certified import CertifiedReader, check_tolerance
from scaleinv.eval.summary import mapping, number
from scaleinv.files import UnreadableFile, read_object, write_json
from scaleinv.lengths import parse
from scaleinv.machine import find_device
from scaleinv.methods import row, trained_as
from scaleinv.model import GPT
from scaleinv.progress import Progress, Report, silent
from scaleinv.train.config import TrainConfig
from scaleinv.train.distributed import World, world
from scaleinv.train.store import check_writable, load_model, read_config, run_corpus, weights_digest
from scaleinv.train.validation import LengthLoss, loss_at_length, usable_tokens

TOKENS = 524_288
"""Validation tokens unless told otherwise: half a million give ±0.005 nats on English bytes."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A method's losses by length; lengths are labelled as they were asked for ("4x", or tokens)."""

    method: str
    seed: int
    model: str
    """The method the model was trained as."""
    train_length: int
    step: int | None
    """The checkpoint's step; None for the run's newest weights."""
    weights: str | None
    """SHA-256 of the run's newest weights; None for a checkpoint."""
    tokens: int
    """Held-out tokens asked for; windows × length is how many were used."""
    lengths: dict[str, LengthLoss]
    tolerance: float | None = None
    """Share of the attention that may be left unread (`scaleinv.CertifiedCache`); None for exact attention."""

    def to_json(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        if self.tolerance is None:
            del values["tolerance"]
        return {"row": values.pop("method"), **values}

    def path(self, folder: Path) -> Path:
        """``<method>-seed<n>.json``, or ``…-step<n>.json`` for a checkpoint; a tolerance is named too."""
        checkpoint = "" if self.step is None else f"-step{self.step}"
        tolerance = "" if self.tolerance is None else f"-tolerance{self.tolerance:g}"
        return folder / f"{self.method}-seed{self.seed}{checkpoint}{tolerance}.json"

    def save(self, folder: Path) -> Path:
        """Write the file, or add these lengths to it if it is of the same model. A damaged one is replaced."""
        path = self.path(folder)
        try:
            earlier = read_evaluation(path)
        except UnreadableFile:
            earlier = None
        whole = self
        if earlier is not None and dataclasses.replace(earlier, lengths=self.lengths) == self:
            whole = dataclasses.replace(self, lengths={**earlier.lengths, **self.lengths})
        write_json(path, whole.to_json())
        return path


def read_evaluation(path: Path) -> Evaluation:
    """Read and check the file of an evaluation."""
    values = read_object(path)
    try:
        found = mapping(values.get("lengths"), "lengths")
        lengths = {label: _length_loss(at, f"lengths.{label}") for label, at in found.items()}
        method, model, weights = (values.get(name) for name in ("row", "model", "weights"))
        seed, train_length, tokens, step = (values.get(name) for name in ("seed", "train_length", "tokens", "step"))
        tolerance = number(values, "tolerance", "evaluation", optional=True)
        for name, value, kind in (
            ("row", method, str),
            ("model", model, str),
            ("weights", weights, str | None),
            ("seed", seed, int),
            ("train_length", train_length, int),
            ("tokens", tokens, int),
            ("step", step, int | None),
        ):
            if not isinstance(value, kind):
                raise ValueError(f"{name} cannot be {value!r:.60}")
        return Evaluation(method, seed, model, train_length, step, weights, tokens, lengths, tolerance)  # type: ignore[arg-type]
    except ValueError as error:
        raise UnreadableFile(path, f"is not an evaluation: {error}", "`scaleinv evaluate` makes it again") from error


def _length_loss(data: Any, where: str) -> LengthLoss:
    data = mapping(data, where)
    length, mean, windows = (number(data, name, where) for name in ("length", "mean", "windows"))
    positions = data.get("positions")
    if not isinstance(positions, list) or any(not isinstance(x, list) or len(x) != 3 for x in positions):
        raise ValueError(f"{where}: positions must be a list of [first, past the last, loss], got {positions!r:.60}")
    named = [dict(zip(("first", "past the last", "loss"), x, strict=True)) for x in positions]
    ranges = [tuple(number(x, name, where) for name in x) for x in named]
    losses = data.get("losses", [])
    if not isinstance(losses, list):
        raise ValueError(f"{where}: losses must be a list of numbers, got {losses!r:.60}")
    return LengthLoss(
        int(length),
        mean,
        number(data, "stderr", where, optional=True),
        int(windows),
        [(int(low), int(high), loss) for low, high, loss in ranges],
        [number({"losses": loss}, "losses", where) for loss in losses],
    )


def evaluate(
    run: Path | str,
    lengths: str = "1x,4x,16x",
    *,
    methods: Sequence[str] | None = None,
    tokens: int = TOKENS,
    step: int | None = None,
    tolerance: float | None = None,
    device: str = "auto",
    out: Path | None = None,
    progress: Progress = silent,
    context_parallel: int = 1,
) -> list[Evaluation]:
    """Loss of a run by length, for the method it was trained as or for others that its model serves.

    Under torchrun every rank calls this with the same arguments and gets the same results; rank 0 writes and reports.

    Args:
        methods: for a RoPE-trained model also "rope+ntk" or "yarn"; None for its own.
        tokens: the most held-out tokens to use, rounded down so that every length divides them.
        step: a checkpoint by its step; None for the newest weights.
        tolerance: read the windows as a decoder with a `scaleinv.CertifiedCache` does; None for exact attention.
        device: "auto" for a GPU if there is one.
        out: the folder in which each method is saved as soon as it is done.
        progress: takes lines of text.
        context_parallel: how many of torchrun's ranks share each window, for contexts that one device cannot hold.
    """
    if context_parallel < 1:
        raise ValueError(f"context_parallel must be positive, got {context_parallel}")
    if tokens < 1:
        raise ValueError(f"tokens must be positive, got {tokens}")
    run = Path(run)
    config, _ = read_config(run)
    methods = list(methods or [config.model.method])
    model_method = trained_as(config.model.method)
    for method in methods:
        if trained_as(method) != model_method:
            raise ValueError(f"methods must be served by a model trained as {model_method!r}, got {method!r}")
        check_tolerance(tolerance, method)
        if context_parallel > 1 and row(method).infini:
            raise ValueError(f"context_parallel must be 1 for {method!r}: the memory of Infini-attention is sequential")
    if context_parallel > 1 and tolerance is not None:
        raise ValueError("context_parallel must be 1 with a tolerance: ranks that share a window have no cache")
    named = parse(lengths, config.model.train_length)
    find_device(device)
    weights = weights_digest(run) if step is None else None
    with world(device, context_parallel) as here:
        for length in named.values():
            here.runs(length)  # raises now if the ranks cannot share this length
        with here.first_goes_first():
            data = run_corpus(config).val
        model, _ = load_model(run, here.device, step)
        model.context = here.context
        count = usable_tokens(data.total, tokens, list(named.values()))
        if out is not None:
            check_writable(out)  # makes the folder, so it comes after all other checks
        results = []
        for method in methods:
            model.use_method(method)
            shown = progress if here.first else silent
            found = _by_length(model, data, named, count, config, here, tolerance, shown)
            made = (config.seed, model_method, config.model.train_length, step, weights, tokens)
            results.append(Evaluation(method, *made, found, tolerance))
            if out is not None:
                here.on_first(results[-1].save, out)
        return results


def _by_length(
    model: GPT,
    data: TokenData,
    lengths: dict[str, int],
    tokens: int,
    config: TrainConfig,
    here: World,
    tolerance: float | None,
    progress: Progress,
) -> dict[str, LengthLoss]:
    """The loss of a model by length, as the method that it is set to."""
    method = model.config.method
    found = {}
    for label, length in lengths.items():

        def show(done: int, total: int, label: str = label) -> None:
            text = f"{method} at {label}: {done}/{total} windows"
            progress(Report(text, passing=True, kind="windows", method=method, length=label, done=done, total=total))

        count = tokens // length * length
        reader = model if tolerance is None else CertifiedReader(model, tolerance)
        found[label] = loss_at_length(
            reader, data, length, count, here=here, document_masks=config.document_masks, progress=show
        )
        progress(_evaluated(method, label, found[label]))
        if isinstance(reader, CertifiedReader):
            progress(f"{method} at {label}: {reader.read:.1%} of the keys read in full")
    return found


def _evaluated(method: str, label: str, found: LengthLoss) -> Report:
    error = f" ± {found.stderr:.4f}" if found.stderr is not None else ""
    text = f"{method} at {label} ({found.length:,} tokens): {found.mean:.4f}{error}"
    return Report(text, kind="evaluated", method=method, length=label, mean=found.mean, stderr=found.stderr)
