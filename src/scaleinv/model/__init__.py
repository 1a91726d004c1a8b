"""The paper's GPT, its caches and Infini-attention."""

from typing import TYPE_CHECKING

from scaleinv import lazy
from scaleinv.model.config import PRESETS, GPTConfig, preset

if TYPE_CHECKING:
    from scaleinv.model.cache import CertifiedKVCache, KVCache
    from scaleinv.model.gpt import GPT

__getattr__, __dir__ = lazy.attach(__name__, {"GPT": "gpt", "CertifiedKVCache": "cache", "KVCache": "cache"})

__all__ = ["GPT", "PRESETS", "CertifiedKVCache", "GPTConfig", "KVCache", "preset"]
