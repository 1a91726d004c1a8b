"""Scale-invariant attention for PyTorch (arXiv 2505.17083): train on short contexts, run on long ones.

>>> import torch, scaleinv
>>> query, key, value = torch.randn(3, 1, 4, 100, 32)
>>> scaleinv.attention(query, key, value).shape
torch.Size([1, 4, 100, 32])
"""

from typing import TYPE_CHECKING

from scaleinv import lazy
from scaleinv.version import VERSION as __version__

if TYPE_CHECKING:
    from scaleinv import analysis as analysis
    from scaleinv import data as data
    from scaleinv import distributed as distributed
    from scaleinv import eval as eval
    from scaleinv import hf as hf
    from scaleinv import methods, rotary, schedule
    from scaleinv import model as model
    from scaleinv import plots as plots
    from scaleinv import reports as reports
    from scaleinv import train as train
    from scaleinv.logits import (
        ALiBi,
        DistanceTable,
        FittedScaleInvariant,
        LogitTransform,
        LogN,
        Plain,
        ScaleInvariant,
    )
    from scaleinv.model import GPT, GPTConfig, KVCache
    from scaleinv.ops.api import attention, which_backend
    from scaleinv.ops.certified import CertifiedCache

__getattr__, __dir__ = lazy.attach(
    __name__,
    {
        **dict.fromkeys(("attention", "which_backend"), "ops.api"),
        "CertifiedCache": "ops.certified",
        **dict.fromkeys(("ALiBi", "DistanceTable", "FittedScaleInvariant", "LogN", "LogitTransform"), "logits"),
        **dict.fromkeys(("Plain", "ScaleInvariant"), "logits"),
        **dict.fromkeys(("GPT", "GPTConfig", "KVCache"), "model"),
        **dict.fromkeys(("methods", "rotary", "schedule"), ""),
        **dict.fromkeys(("analysis", "data", "distributed", "eval", "hf"), ""),
        **dict.fromkeys(("model", "plots", "reports", "train"), ""),
    },
)

__all__ = [
    "GPT",
    "ALiBi",
    "CertifiedCache",
    "DistanceTable",
    "FittedScaleInvariant",
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
