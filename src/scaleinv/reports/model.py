"""Everything that a trained model can show, in one folder: figure 1 (bottom), mass per range, QQ-plots, calibration."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scaleinv.analysis.calibrate import Calibration
from scaleinv.analysis.capture import model_name, training_length, windows_of
from scaleinv.analysis.figures import Progress
from scaleinv.analysis.model import ModelStatistics, check_lengths, model_statistics
from scaleinv.analysis.scores import score_statistics
from scaleinv.analysis.sparsity import sparsity
from scaleinv.files import read_object
from scaleinv.hub import check_source, reason
from scaleinv.lengths import parse
from scaleinv.plots import model as plots
from scaleinv.plots.sparsity import save_sparsity
from scaleinv.reports.folder import claim, fingerprint

LENGTHS = ("1x", "4x", "16x")
"""Context lengths unless others are asked for: multiples of the training length."""

WINDOWS = 4
"""Windows of the text at each length, or as many as it has."""


def model_report(
    model: nn.Module,
    tokens: Tensor | Sequence[int],
    lengths: str | Sequence[str | int],
    out: Path,
    *,
    name: str | None = None,
    windows: int = WINDOWS,
    bos: int | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Write numbers (CSV, JSON) and figures (PNG, SVG) to ``out``, and return the paths. Needs matplotlib.

    Each part is written as soon as it is done, so an interrupted run leaves what it has: ``scores``, ``qq-rotary``,
    ``qq-no-rotary`` and ``calibration.json`` come first, then ``attention``, ``figure1-model`` and ``ranges``, and
    ``sparsity`` last.
    ``model.json`` says which model they are of: a folder that holds another model's raises ValueError.

    Args:
        model: our `GPT` or a Hugging Face causal language model.
        tokens: a text, ``[T]``.
        lengths: context lengths, in tokens or as multiples of the training length ("4x"). The scores are those at the
            training length.
        bos: a token to put before each window, for models that always saw one there.
        progress: called with one line of text before each step.
    """
    out = Path(out)
    wanted = context_lengths(lengths, model)
    check_lengths(wanted)  # now, not after the scores
    windows_of(tokens, max(wanted), windows, bos)
    named = {"model": name or model_name(model), "weights": fingerprint(model)}
    claimed = claim(out, ("model.json", "scores.json", "attention.json"), named)
    scores = score_statistics(model, tokens, name=name, windows=windows, bos=bos, progress=progress)
    paths = [claimed, *scores.save(out), *plots.save_qq(scores, out)]
    paths.append(Calibration.of(scores).save(out / "calibration.json"))
    statistics: ModelStatistics | None = None
    written: list[Path] = []
    for length in wanted:
        found = model_statistics(model, tokens, [length], name=name, windows=windows, bos=bos, progress=progress)
        before = () if statistics is None else statistics.lengths
        statistics = dataclasses.replace(found, lengths=(*before, *found.lengths))
        pictures = [*plots.save_models([statistics], out), *plots.save_ranges(statistics, out)]
        written = [*statistics.save(out), *pictures]  # written again after each length
    needs = sparsity(model, tokens, wanted, name=name, windows=windows, bos=bos, progress=progress)
    return [*paths, *written, *needs.save(out), *save_sparsity(needs, out)]


def analyze_model(
    path: str,
    lengths: str | Sequence[str | int] = LENGTHS,
    text: Path | None = None,
    out: Path = Path("figures"),
    progress: Progress | None = None,
) -> list[Path]:
    """`model_report` for a run's folder, or for a Hugging Face model's folder or id.

    Args:
        path: what ``scaleinv train`` or ``save_pretrained`` wrote, or a name on the Hugging Face hub.
        lengths: as in `model_report`.
        text: text to run the model on, as in `scaleinv.data`: a file, a folder or a corpus by name. None for the
            validation data of a run; a Hugging Face model needs it.
        out: the folder to write to.
    """
    from scaleinv.train.store import check_writable

    model, tokens, bos, name = (_open_run if _is_run(Path(path)) else _open_hf)(path, lengths, text)
    check_writable(Path(out))
    return model_report(model, tokens, lengths, out, name=name, bos=bos, progress=progress)


def context_lengths(lengths: str | Sequence[str | int], model: nn.Module) -> list[int]:
    """Lengths in tokens, ascending, from numbers and multiples of the model's training length.

    >>> from scaleinv.model import GPT, GPTConfig
    >>> context_lengths(["4x", 100, "0.5x"], GPT(GPTConfig(layers=1, train_length=512)))
    [100, 256, 2048]
    """
    try:
        train_length = training_length(model)
    except ValueError:  # lengths in tokens still work
        train_length = None
    return sorted(set(parse(lengths, train_length).values()))


Opened = tuple[nn.Module, Tensor, int | None, str]
"""Model, tokens, BOS and name."""


def _open_run(path: str, lengths: str | Sequence[str | int], text: Path | None) -> Opened:
    from scaleinv.train.store import load_model, run_corpus, run_tokenizer

    model, config = load_model(path)
    longest = max(context_lengths(lengths, model))
    name = model.config.method
    if text is None:
        data = run_corpus(config, min_length=longest).val
        return model, torch.from_numpy(data.read(0, min(data.total, WINDOWS * longest)).astype("int64")), None, name
    tokenizer = run_tokenizer(path)
    parts = (torch.tensor([tokenizer.end_of_text, *map(int, tokenizer.encode(part))]) for part in _texts(text))
    return model, _enough(parts, longest, text), None, name


def _open_hf(path: str, lengths: str | Sequence[str | int], text: Path | None) -> Opened:
    if text is None:
        raise ValueError(
            f"text must be given for a Hugging Face model: {path!r} has none (and it is not a run's folder)"
        )
    try:
        check_source(path)
        from transformers import AutoTokenizer

        from scaleinv.hf.source import load_pretrained
    except ImportError as error:
        raise RuntimeError(f"path {path!r} is not a run's folder, and Hugging Face models need transformers") from error
    model = load_pretrained(path).eval()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # whatever transformers makes of a damaged file
        raise ValueError(f"the tokenizer of {path} cannot be loaded: {reason(error)}") from error
    bos = tokenizer.bos_token_id
    bos = bos if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else None
    options: dict[str, Any] = {
        "add_special_tokens": False,
        "verbose": False,
    }  # no warning about length
    parts = (torch.tensor(tokenizer(part, **options)["input_ids"], dtype=torch.int64) for part in _texts(text))
    return model, _enough(parts, max(context_lengths(lengths, model)), text), bos, Path(path).name


def _texts(text: Path) -> Iterator[str]:
    from scaleinv.data import documents

    return (document.text for document in documents(str(text)))


def _enough(parts: Iterator[Tensor], longest: int, text: Path) -> Tensor:
    """The documents one after another, until there are tokens for all windows."""
    found, count = [], 0
    for part in parts:
        found.append(part)
        count += part.numel()
        if count >= WINDOWS * longest:
            break
    if count < longest:
        raise ValueError(f"text {str(text)!r} holds {count:,} tokens, but the longest context asked for is {longest:,}")
    return torch.cat(found)


def _is_run(path: Path) -> bool:
    config = path / "config.json"
    return config.is_file() and "train" in read_object(config, "it must be a run's or a Hugging Face model's")
