"""The paper's GPT, its caches and Infini-attention."""

from scaleinv.model.cache import KVCache
from scaleinv.model.config import PRESETS, GPTConfig, preset
from scaleinv.model.gpt import GPT

__all__ = ["GPT", "PRESETS", "GPTConfig", "KVCache", "preset"]
