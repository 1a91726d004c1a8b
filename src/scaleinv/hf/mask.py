"""What transformers' mask interface passes on to our attention: the positions of queries and keys.

Only the mask function sees both offsets (query and key) and the 2-D padding mask. So it decides, once per forward:

- a regular step (prefill, training: positions without holes) becomes a `Regular`, which `scaleinv.attention` takes as
  it is, with nothing of size N × N;
- everything else (decoding, holes, masks we do not recognise) becomes a tensor ``[B, 1, Nq, Nk]`` that holds the
  distance of each visible pair and HIDDEN elsewhere. Its int32 go as MARKED, a dtype that no mask of a user's has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.masking_utils import causal_mask_function, sdpa_mask

from scaleinv.ops.masks import Geometry, pair_mask

HIDDEN = -1
MARKED = torch.uint32


@dataclasses.dataclass
class Regular:
    """A step whose geometry `scaleinv.attention` understands: query i stands at ``offset + i``, key j at j."""

    offset: int
    window: int | None = None
    key_mask: Tensor | None = None
    document_ids: Tensor | None = None
    asked: bool = False
    """No need to look for packed documents: that is done, or there was a mask, with which transformers never packs."""

    # `generate` prepares masks for static caches before it calls the model, and uses these two attributes of a tensor.
    ndim = 4

    def contiguous(self) -> Regular:
        return self

    def to(self, device: torch.device | str, **kwargs: Any) -> Regular:
        """For accelerate, whose hooks move what a layer gets to the layer's device."""
        key_mask, document_ids = (
            None if x is None else x.to(device, **kwargs) for x in (self.key_mask, self.document_ids)
        )
        return dataclasses.replace(self, key_mask=key_mask, document_ids=document_ids)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the model asks its attention mask for {name!r}: models that work on masks themselves are not supported "
            "by scaleinv.hf"
        )

    def split(self, position_ids: Tensor, keys: int) -> None:
        """Tell packed documents apart by ``position_ids [B, Nq]`` that are not consecutive.

        transformers does this ahead of the mask function, but not for GPT-OSS, whose stock form mixes the documents.
        """
        whole = self.offset == 0 and position_ids.shape[1] == keys  # no cache
        compiling = torch.compiler.is_compiling()  # then ids are there even if transformers found no documents
        if self.asked or not whole or self.key_mask is not None or (self.document_ids is not None and not compiling):
            return
        self.asked = True  # all layers share this object
        document_ids = F.pad((position_ids.diff(dim=1) != 1).cumsum(1), (1, 0))
        if self.document_ids is not None:
            document_ids = document_ids + self.document_ids  # both grow where a document ends
        if compiling or bool(document_ids.any()):
            self.document_ids = document_ids

    def distances(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """The same as a tensor of distances, ``[B or 1, 1, Nq, Nk]``."""
        geometry = Geometry.of(queries, keys, self.offset, causal=True, window=self.window)
        visible = pair_mask(geometry, self.document_ids, self.key_mask, device)
        return torch.where(visible, geometry.distances(device), HIDDEN).to(torch.int32)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | Regular | None = None,
    local_size: int | None = None,
    config: Any = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Regular | Tensor:
    """The mask function that `scaleinv.hf` registers; arguments as in `transformers.masking_utils.sdpa_mask`."""
    if isinstance(attention_mask, Regular):  # prepared by `generate`
        return attention_mask
    device = torch.device(device)
    if q_length > 1 and not use_vmap:
        pattern = _pattern(mask_function, local_size, config)
        if pattern is not None:
            regular = _regular(
                batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, *pattern, device
            )
            if regular is not None:
                return regular

    visible: Any = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,  # type: ignore[arg-type]  # a tensor for static caches
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    query = torch.arange(q_length, device=device)[None] + q_offset
    key = torch.arange(kv_length, device=device)[None] + kv_offset
    if attention_mask is not None:  # padding has no position: count the real tokens
        count = _padded(attention_mask, kv_length, kv_offset).cumsum(-1)
        query, key = count[:, query[0]], count[:, key[0]]
    distance = (query[:, :, None] - key[:, None, :]).abs()[:, None]
    return torch.where(visible, distance, HIDDEN).to(torch.int32).view(MARKED)


def _padded(mask: Tensor, kv_length: int, kv_offset: int) -> Tensor:
    """The 2-D mask with False for the empty slots of a static cache."""
    return F.pad(mask, (0, max(kv_length + kv_offset - mask.shape[-1], 0)))


def _pattern(mask_function: Callable, local_size: int | None, config: Any) -> tuple[int | None, bool] | None:
    """(window, may be packed) if the function is causal, in a window or not, packed or not; None for anything else.

    transformers builds these masks in `create_causal_mask` and `create_sliding_window_causal_mask`, out of functions
    joined by `and_masks`. Blocks that see each other in both directions come joined by `or_masks`, a user's own
    functions with `use_vmap`, and chunked attention with the chunk as its local size.
    """
    if mask_function is causal_mask_function:
        return None, False
    if not mask_function.__qualname__.startswith("and_masks."):
        return None
    if local_size is None:
        return None, True
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    return (local_size, True) if local_size == window and local_size != chunk and local_size > 1 else None


def _regular(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: Callable,
    padding: Tensor | None,
    window: int | None,
    packed: bool,
    device: torch.device,
) -> Regular | None:
    compiling = torch.compiler.is_compiling()
    if compiling and (padding is not None or isinstance(q_offset, Tensor)):
        return None  # the data say whether it is regular, and a compiled graph cannot inspect them
    key_mask = None
    if padding is not None:
        padding = _padded(padding, kv_length, kv_offset)
        starts = padding[:, :1].sum(1) + (padding[:, 1:] & ~padding[:, :-1]).sum(1)
        if bool((starts > 1).any()):
            return None  # holes: the distance is not a difference of places
        key_mask = padding[:, kv_offset : kv_offset + kv_length]
        key_mask = None if bool(key_mask.all()) else key_mask
    document_ids = None
    whole = not isinstance(q_offset, Tensor) and q_offset == kv_offset == 0 and q_length == kv_length
    if packed and window is None and not whole:
        return None  # transformers packs only without a cache
    if packed and whole:  # two neighbours see each other unless a document ends between them
        place = torch.arange(1, q_length, device=device)[None]
        batch = torch.arange(batch_size, device=device)[:, None]
        joined = mask_function(batch, torch.zeros_like(batch), place, place - 1).expand(batch_size, -1)
        document_ids = F.pad((~joined).cumsum(1), (1, 0))
        if not compiling and not bool(document_ids.any()):
            document_ids = None
    return Regular(int(q_offset) - kv_offset, window, key_mask, document_ids, asked=padding is not None)
