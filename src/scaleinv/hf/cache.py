"""`CertifiedCache` for transformers: converted models decode with `scaleinv.CertifiedCache` in every layer."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from scaleinv.hf.mask import HIDDEN, MARKED, Regular
from scaleinv.logits import LogitTransform
from scaleinv.ops import certified


class Held:
    """What a layer's attention gets in place of keys and values: the cache that holds them."""

    def __init__(self, layer: CertifiedLayer) -> None:
        self.layer = layer

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"the model asks its cached keys for {name!r}. scaleinv.hf.CertifiedCache serves models converted by "
            "scaleinv.hf.convert, unless they work on their keys outside of the attention function"
        )


class CertifiedLayer(CacheLayerMixin):
    """One layer's keys and values. A prompt gets exact attention, a decoding step a certified one."""

    is_sliding = False

    def __init__(self, tolerance: float) -> None:
        super().__init__()
        self.tolerance = tolerance
        self.held = certified.CertifiedCache(tolerance=tolerance)
        self.certificate: certified.Certificate | None = None
        """Of the last step; None after a prompt."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Add keys and values ``[B, KV, n, D]``; returns all of them, or for a single token a `Held`."""
        self.is_initialized = True
        past = self.held.length
        self.held.append(key_states, value_states)
        self.certificate = None
        if key_states.shape[2] == 1:
            return Held(self), Held(self)
        if past == 0:
            return key_states, value_states
        key, value = self.held.tensors()
        return key.to(key_states.dtype), value.to(value_states.dtype)

    def attend(self, query: Tensor, logits: LogitTransform, scale: float, key_mask: Tensor | None) -> Tensor:
        """Attention of the last token's query ``[B, H, 1, D]``."""
        self.held.logits, self.held.scale = logits, scale
        out, self.certificate = self.held.attend(query, key_mask=key_mask)
        return out

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.held.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.held.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.held = certified.CertifiedCache(tolerance=self.tolerance)
        self.certificate, self.is_initialized = None, False

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"scaleinv.hf.CertifiedCache does not support {what}: use transformers.DynamicCache")

    def offload(self) -> NoReturn:
        self._refuse("offloading")

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        self._refuse("beam search")

    def crop(self, tokens_to_remove: int) -> NoReturn:
        self._refuse("removing tokens (assisted decoding)")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        self._refuse("beams or several candidates")

    def batch_select_indices(self, indices: Tensor) -> NoReturn:
        self._refuse("beams or several candidates")


class CertifiedCache(Cache):
    """A cache for ``model.generate(past_key_values=…)`` of a converted model: greedy decoding and sampling.

    >>> cache = CertifiedCache(tolerance=1e-3)
    >>> cache.get_seq_length()
    0

    Padding must be on the left. Prompts get exact attention.

    Args:
        tolerance: as in `scaleinv.CertifiedCache`: the share of each query's softmax weight that may be left unread.
    """

    layers: list[CertifiedLayer]  # type: ignore[assignment]

    def __init__(self, tolerance: float = 1e-3) -> None:
        certified.CertifiedCache(tolerance=tolerance)  # a bad tolerance is an error here, not at the first token
        super().__init__(layer_class_to_replicate=lambda: CertifiedLayer(tolerance))  # type: ignore[arg-type]

    @property
    def certificates(self) -> list[certified.Certificate | None]:
        """Of each layer's last step; None after a prompt."""
        return [layer.certificate for layer in self.layers]


def visible_keys(mask: Regular | Tensor | None, keys: int) -> Tensor | None:
    """Which keys a decoding step sees, bool ``[B, keys]``; None for all. ValueError for padding between tokens."""
    if mask is None:
        return None
    if isinstance(mask, Regular):
        visible = mask.distances(1, keys, torch.device("cpu"))[:, 0, 0]
    elif mask.dtype == MARKED:
        visible = mask.view(torch.int32)[:, 0, -1]
    else:
        raise ValueError("attention_mask must come from the mask function of scaleinv.hf: pass the model a 2-D one")
    distance = torch.arange(keys - 1, -1, -1, device=visible.device)
    if not bool(((visible == distance) | (visible == HIDDEN)).all()):
        raise ValueError("padding must be on the left with scaleinv.hf.CertifiedCache, got padding between tokens")
    shown = visible != HIDDEN
    return None if bool(shown.all()) else shown
