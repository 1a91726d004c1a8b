"""A run's folder: config.json, metrics.jsonl, model.safetensors, tokenizer/, checkpoints/, tensorboard/."""

from __future__ import annotations

import functools
import hashlib
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scaleinv.data import ByteTokenizer, Corpus, Tokenizer, load_corpus, load_tokenizer
from scaleinv.data.documents import absolute_spec
from scaleinv.data.tokenizers import absolute_tokenizer
from scaleinv.files import UnreadableFile, check_regular, read_object, replacing, write_json
from scaleinv.model import GPT
from scaleinv.train import checkpoint
from scaleinv.train.config import TrainConfig
from scaleinv.train.optim import as_states
from scaleinv.version import VERSION

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer"


def write_config(folder: Path, config: TrainConfig, corpus: Corpus) -> None:
    """All that is needed to run it again from any folder, and what it ran on."""
    paths = {
        "data": absolute_spec(config.data),
        "val_data": absolute_spec(config.val_data) if config.val_data else None,
        "tokenizer": absolute_tokenizer(config.tokenizer) if config.tokenizer else None,
    }
    values = {
        "train": config.to_json() | paths,
        "corpus": {
            "description": corpus.description,
            "sha256": corpus.sha256,
            "train_tokens": corpus.train.total,
            "val_tokens": corpus.val.total,
        },
        "versions": {"scaleinv": VERSION, "torch": torch.__version__, "python": platform.python_version()},
    }
    write_json(folder / CONFIG, values)


def read_config(folder: Path) -> tuple[TrainConfig, dict[str, Any]]:
    """A run's config, and all of its config.json."""
    path = Path(folder) / CONFIG
    if not path.exists():
        raise ValueError(f"{folder} holds no run: there is no {CONFIG} in it")
    values = read_object(path)
    try:
        if not isinstance(values.get("corpus"), dict):
            raise ValueError("corpus must be an object")
        return TrainConfig.from_json(values["train"]), values
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnreadableFile(path, f"does not hold a run's settings ({type(error).__name__}: {error})") from error


def write_weights(folder: Path, weights: dict[str, Tensor], step: int) -> None:
    """Write model.safetensors after ``step`` steps, whole or not at all, with a hash of its tensors."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    metadata = {"format": "pt", "step": str(step), "sha256": tensor_hash(weights)}
    try:
        with replacing(folder / WEIGHTS) as temporary:
            save_file(weights, temporary, metadata=metadata)
    except (OSError, SafetensorError) as error:
        reason = str(error).strip() or type(error).__name__
        raise checkpoint.CheckpointError(f"weights could not be written to {folder / WEIGHTS}: {reason}") from error


def read_weights(folder: Path | str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a run's model.safetensors, on the CPU, and its metadata, with their hash as "sha256".

    If the file is missing or damaged, or its tensors do not match their hash, raises ValueError that names it. Older
    files without a hash are taken as they are.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(folder) / WEIGHTS
    advice = f"`scaleinv train --resume {folder}` writes it again from the last checkpoint"
    check_regular(path, advice)
    try:
        with safe_open(path, "pt") as file:
            metadata = dict(file.metadata() or {})
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UnreadableFile(path, f"is damaged ({error})", advice) from error
    digest = tensor_hash(weights)
    if metadata.setdefault("sha256", digest) != digest:
        raise UnreadableFile(path, "is damaged (its tensors do not have the hash they were written with)", advice)
    return weights, metadata


def tensor_hash(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes of tensors, whatever their order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def weights_step(folder: Path) -> int | None:
    """The step of model.safetensors; None if the file is missing or damaged, or does not say."""
    try:
        return _weights(Path(folder))[0]
    except ValueError:
        return None


def weights_digest(folder: Path) -> str:
    """The `tensor_hash` of a run's newest weights: the same for the same weights, however they were written."""
    return _weights(Path(folder))[1]


def _weights(folder: Path) -> tuple[int | None, str]:
    """Step and hash of the newest weights, read once per state of the file."""
    path = folder / WEIGHTS
    stat = path.stat() if path.exists() else None
    return _read_state(folder, *((stat.st_ino, stat.st_mtime_ns, stat.st_size) if stat else (0, 0, 0)))


@functools.lru_cache(maxsize=1024)
def _read_state(folder: Path, inode: int, changed: int, size: int) -> tuple[int | None, str]:
    _, metadata = read_weights(folder)
    step = metadata.get("step", "")
    return int(step) if step.isdigit() else None, metadata["sha256"]


def load_model(
    folder: Path | str, device: str | torch.device = "cpu", step: int | None = None
) -> tuple[GPT, TrainConfig]:
    """A run's model in evaluation mode: with its newest exported weights, or those of the checkpoint of a step."""
    folder = Path(folder)
    config, _ = read_config(folder)
    model = GPT(config.model)
    if step is not None:
        path = checkpoint.of_step(folder / CHECKPOINTS, step)
        checkpoint.load(path, as_states(model.state_dict()))
    else:
        weights, _ = read_weights(folder)
        _check_fit(folder, weights, model.state_dict())
        model.load_state_dict(weights)
    return model.to(device).eval(), config


def _check_fit(folder: Path, weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise ValueError if the weights do not fit the model that config.json describes."""
    path = folder / WEIGHTS
    for name in sorted(expected.keys() | weights.keys()):
        found, wanted = (list(x[name].shape) if name in x else "no tensor" for x in (weights, expected))
        if found != wanted:
            raise UnreadableFile(path, f"does not fit {CONFIG}: {name} has shape {found}, and {wanted} is needed")


def write_run(folder: Path, config: TrainConfig, corpus: Corpus) -> None:
    """What a run begins with: config.json and tokenizer/."""
    write_config(folder, config, corpus)
    (folder / TOKENIZER).mkdir(exist_ok=True)
    corpus.tokenizer.save(folder / TOKENIZER)


def run_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer a run was trained with."""
    return load_tokenizer(Path(folder) / TOKENIZER)


def run_corpus(config: TrainConfig, min_length: int = 0, *, fit: bool = False) -> Corpus:
    """The corpus of a run.

    Args:
        min_length: see `scaleinv.data.load_corpus`.
        fit: for a new run: replace a vocabulary of bytes, the model's default, by the tokenizer's.
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
    """Raise ValueError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"out cannot be written to: {folder}: {error.strerror or error}") from error
