"""A run's folder: config.json, metrics.jsonl, model.safetensors, tokenizer/, checkpoints/, tensorboard/."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scaleinv.data import ByteTokenizer, Corpus, Tokenizer, load_corpus, load_tokenizer
from scaleinv.files import write_text
from scaleinv.model import GPT
from scaleinv.train import checkpoint
from scaleinv.train.config import TrainConfig
from scaleinv.version import VERSION

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer"


def write_config(folder: Path, config: TrainConfig, corpus: Corpus) -> None:
    """All that is needed to run it again, and what it ran on."""
    values = {
        "train": config.to_json(),
        "corpus": {
            "description": corpus.description,
            "sha256": corpus.sha256,
            "train_tokens": corpus.train.total,
            "val_tokens": corpus.val.total,
        },
        "versions": {"scaleinv": VERSION, "torch": torch.__version__, "python": platform.python_version()},
    }
    write_text(folder / CONFIG, json.dumps(values, indent=1, ensure_ascii=False))


def read_config(folder: Path) -> tuple[TrainConfig, dict[str, Any]]:
    """A run's config, and the whole of its config.json."""
    path = Path(folder) / CONFIG
    try:
        values = json.loads(path.read_text())
        return TrainConfig.from_json(values["train"]), values
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no run: there is no {CONFIG} in it") from None
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a run's configuration: {error}") from error


def write_weights(folder: Path, weights: dict[str, Tensor], step: int) -> None:
    """model.safetensors after so many steps, whole or not at all."""
    from safetensors.torch import save_file

    temporary = folder / f".{WEIGHTS}.partial"
    save_file(weights, temporary, metadata={"format": "pt", "step": str(step)})
    os.replace(temporary, folder / WEIGHTS)


def weights_step(folder: Path) -> int | None:
    """The step that model.safetensors is of; None where there is none, or it does not say."""
    from safetensors import safe_open

    if not (folder / WEIGHTS).exists():
        return None
    with safe_open(folder / WEIGHTS, "pt") as file:
        step = (file.metadata() or {}).get("step")
    return None if step is None else int(step)


def weights_digest(folder: Path) -> str:
    """SHA-256 of model.safetensors."""
    path = folder / WEIGHTS
    stat = path.stat()
    return _digest(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=1024)
def _digest(path: Path, changed: int, size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load_model(
    folder: Path | str, device: str | torch.device = "cpu", step: int | None = None
) -> tuple[GPT, TrainConfig]:
    """A run's model in evaluation mode: with its newest exported weights, or those of the checkpoint of a step."""
    from safetensors.torch import load_file

    folder = Path(folder)
    config, _ = read_config(folder)
    if step is not None:
        path = checkpoint.of_step(folder / CHECKPOINTS, step)
        model = GPT(config.model)
        checkpoint.load(path, {f"model.{name}": tensor for name, tensor in model.state_dict().items()})
        return model.to(device).eval(), config
    path = folder / WEIGHTS
    if not path.exists():
        raise ValueError(f"{folder} has no {WEIGHTS} yet: train it first (scaleinv train --resume {folder})")
    model = GPT(config.model)
    model.load_state_dict(load_file(path))
    return model.to(device).eval(), config


def run_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer a run was trained with."""
    return load_tokenizer(Path(folder) / TOKENIZER)


def run_corpus(config: TrainConfig, min_length: int = 0, *, fit: bool = False) -> Corpus:
    """The corpus of a run.

    Args:
        min_length: see `scaleinv.data.load_corpus`.
        fit: a vocabulary of bytes, a model's default, gives way to the tokenizer's: for a run that is to begin.
    """
    vocab_size = config.model.vocab_size
    return load_corpus(
        config.data,
        config.val_data,
        tokenizer=config.tokenizer,
        vocab_size=None if fit and vocab_size <= ByteTokenizer.vocab_size else vocab_size,
        min_length=min_length,
    )


def check_writable(folder: Path) -> None:
    """ValueError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"out cannot be written to: {folder}: {error.strerror or error}") from error
