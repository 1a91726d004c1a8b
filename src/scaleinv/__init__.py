"""Scale-invariant attention for PyTorch (arXiv 2505.17083): train on short contexts, run on long ones.

>>> import torch, scaleinv
>>> query, key, value = torch.randn(3, 1, 4, 100, 32)
>>> scaleinv.attention(query, key, value).shape
torch.Size([1, 4, 100, 32])
"""

from scaleinv import methods, rotary, schedule
from scaleinv.logits import ALiBi, DistanceTable, LogitTransform, LogN, Plain, ScaleInvariant
from scaleinv.ops.api import attention, which_backend
from scaleinv.version import VERSION as __version__

__all__ = [
    "ALiBi",
    "DistanceTable",
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
