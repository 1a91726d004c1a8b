"""The paper's GPT, its caches and Infini-attention."""

from typing import TYPE_CHECKING

from scaleinv import lazy
from scaleinv.model.config import PRESETS, GPTConfig, preset

if TYPE_CHECKING:
    from scaleinv.model.cache import KVCache
    from scaleinv.model.gpt import GPT

__getattr__, __dir__ = lazy.attach(__name__, {"GPT": "gpt", "KVCache": "cache"})

__all__ = ["GPT", "PRESETS", "GPTConfig", "KVCache", "preset"]
