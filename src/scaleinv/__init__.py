"""Scale-invariant attention for PyTorch (arXiv 2505.17083): train on short contexts, run on long ones.

>>> import torch, scaleinv
>>> query, key, value = torch.randn(3, 1, 4, 100, 32)
>>> scaleinv.attention(query, key, value).shape
torch.Size([1, 4, 100, 32])
"""

import importlib
from typing import TYPE_CHECKING, Any

from scaleinv import methods, rotary, schedule
from scaleinv.logits import ALiBi, DistanceTable, LogitTransform, LogN, Plain, ScaleInvariant
from scaleinv.ops.api import attention, which_backend
from scaleinv.version import VERSION as __version__

if TYPE_CHECKING:
    from scaleinv.model import GPT, GPTConfig, KVCache

_LAZY = {"GPT": "model", "GPTConfig": "model", "KVCache": "model"}
_PACKAGES = ("analysis", "data", "eval", "hf", "model", "plots", "reports", "train")


def __getattr__(name: str) -> Any:
    """The model and the packages around it, imported when first used: the operator alone stays light."""
    if name in _LAZY:
        return getattr(importlib.import_module(f"scaleinv.{_LAZY[name]}"), name)
    if name in _PACKAGES:
        return importlib.import_module(f"scaleinv.{name}")
    raise AttributeError(f"module 'scaleinv' has no attribute {name!r}")


__all__ = [
    "GPT",
    "ALiBi",
    "DistanceTable",
    "GPTConfig",
    "KVCache",
    "LogN",
    "LogitTransform",
    "Plain",
    "ScaleInvariant",
    "__version__",
    "attention",
    "methods",
    "rotary",
    "schedule",
    "which_backend",
]
