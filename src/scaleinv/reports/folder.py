"""A folder of results belongs to one model, or to one choice of settings: others are refused, not written over."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scaleinv.files import read_object, write_json

SAMPLED = 64
"""Values of each tensor that a fingerprint takes."""


def claim(folder: Path, files: Sequence[str], settings: Mapping[str, Any]) -> Path:
    """Note what a folder's results belong to in the first of ``files`` and return its path.

    Raises ValueError if the first of ``files`` that exists says otherwise; the message names both.
    """
    there = next((folder / name for name in files if (folder / name).exists()), None)
    held = {} if there is None else read_object(there, f"choose another folder than {folder}, or delete it")
    held = {name: held[name] for name in settings if name in held}
    if any(held[name] != settings[name] for name in held):
        raise ValueError(
            f"out {folder} holds results of {_described(held)}, but these are of {_described(settings)}: "
            "choose another folder, or delete it"
        )
    write_json(folder / files[0], settings)
    return folder / files[0]


def fingerprint(model: nn.Module) -> str:
    """A short hash of a model's weights, from a few values of each tensor."""
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        flat = value.detach().flatten()
        sample = flat[:: max(1, flat.numel() // SAMPLED)].to("cpu", torch.float64)
        found.update(f"{name} {tuple(value.shape)} {sample.tolist()}".encode())
    return found.hexdigest()[:16]


def _described(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
