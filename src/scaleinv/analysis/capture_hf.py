"""Queries and keys of Hugging Face models: every decoder-only model that `scaleinv.hf` can convert.

The capture itself is `scaleinv.hf.scores.observed`.

Queries and keys before the rotary embedding are seen when the model calls ``apply_rotary_pos_emb`` or a function of a
similar name, as almost all of transformers does: during the capture these functions record their calls. What they
returned is compared with what then reaches attention, so that nothing is mistaken. Models that do more in between
(DeepSeek rotates part of each head separately) give no scores without the rotary; everything else works.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from scaleinv.analysis.capture import Consume, Layer
from scaleinv.hf.mask import Regular
from scaleinv.hf.scores import observed

_ROTARY = "apply_rotary"
"""How the names of transformers' rotary functions begin."""

Pair = tuple[Tensor, Tensor]


def capture_hf(model: PreTrainedModel, tokens: Tensor, consume: Consume) -> None:
    """`scaleinv.analysis.capture` for a Hugging Face model."""
    _check_length(model, tokens.shape[1])
    with _notes(model) as notes:

        def see(module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]) -> None:
            consume(_layer(module, query, key, mask, notes.take(module, query, key), options))

        with observed(model, see):
            model.base_model(input_ids=tokens.to(model.device), use_cache=False)


def training_length(model: PreTrainedModel) -> int:
    """``max_position_embeddings``."""
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not length:
        raise ValueError(f"{type(model).__name__} does not say its training length: give lengths in tokens")
    return int(length)


def model_name(model: PreTrainedModel) -> str:
    """The last part of the path that it was loaded from, or its model type."""
    return str(model.config.name_or_path).rstrip("/").rpartition("/")[2] or model.config.get_text_config().model_type


def _layer(
    module: Any, query: Tensor, key: Tensor, mask: Any, unrotated: Pair | None, options: dict[str, Any]
) -> Layer:
    plain = isinstance(mask, Regular) and mask.offset == 0 and mask.key_mask is None and mask.document_ids is None
    if not plain:
        raise ValueError(
            f"{type(module).__name__} has a mask that is neither causal nor a sliding window: not supported"
        )
    transforms = module.config.logit_transforms
    scaling = options.get("scaling")
    return Layer(
        module.layer_idx,
        query,
        key,
        unrotated,
        transforms[module.layer_idx if len(transforms) > 1 else 0],
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        mask.window,
        options.get("softcap"),
        options.get("s_aux"),
    )


class _Notes:
    """The last call of a rotary function: what went in and what came out."""

    def __init__(self, spaces: set[int], rotary: bool) -> None:
        self.spaces = spaces
        """Namespaces with a rotary function, by id."""
        self.rotary = rotary
        """Whether the model has a rotary embedding at all."""
        self.call: tuple[Any, Any] | None = None

    def take(self, module: nn.Module, query: Tensor, key: Tensor) -> Pair | None:
        """The query and key of a layer before the rotary; None if they are not what the function was given."""
        call, self.call = self.call, None
        if call is None:  # a model or a layer without rotary, or a rotary that we do not see
            seen = not self.rotary or id(_namespace(module)) in self.spaces
            return (query, key) if seen else None
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in call):
            return None
        parts = []
        for before, after, arrived in zip(*call, (query, key), strict=True):
            turned = after.shape[-1]  # Phi turns the first channels only
            if after.shape[:-1] != arrived.shape[:-1] or not torch.equal(after, arrived[..., :turned]):
                return None
            parts.append(torch.cat([before, arrived[..., turned:]], dim=-1))
        return parts[0], parts[1]


@contextlib.contextmanager
def _notes(model: PreTrainedModel) -> Iterator[_Notes]:
    """Let the model's rotary functions record their calls."""
    found = {
        (id(space), name): (space, value)
        for space in map(_namespace, model.modules())
        for name, value in space.items()
        if name.startswith(_ROTARY) and callable(value)
    }
    rotary = bool(getattr(model.config.get_text_config(), "rope_parameters", None))
    notes = _Notes({space for space, _ in found}, rotary)

    def noting(rotate: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*inputs: Any, **options: Any) -> Any:
            after = rotate(*inputs, **options)
            notes.call = inputs[:2], after
            return after

        return wrapper

    try:
        for (_, name), (space, function) in found.items():
            space[name] = noting(function)
        yield notes
    finally:
        for (_, name), (space, function) in found.items():
            space[name] = function


def _namespace(module: nn.Module) -> dict[str, Any]:
    """Where the functions that a module's forward calls by name are looked up."""
    return getattr(inspect.unwrap(type(module).forward), "__globals__", {})


def _check_length(model: PreTrainedModel, length: int) -> None:
    text = model.config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    if not getattr(text, "rope_parameters", None) and most and length > most:
        raise ValueError(
            f"lengths must be at most {most} for {type(model).__name__}, which learns its positions; got {length}"
        )
