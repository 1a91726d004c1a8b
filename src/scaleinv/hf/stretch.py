"""YaRN at inference: a converted model's own rotary, slowed beyond its trained length, and fixed for each context.

Keys lie in a cache as they were turned, so a context keeps the stretch that it was opened with. A forward pass with an
empty cache, or without any, opens one, for a length that is

- what `stretch_to` fixed; or else
- inside ``generate``, the tokens of the prompt and of the longest answer (``max_new_tokens``, ``max_length``); or else
- the tokens of that pass (its highest position + 1).

The cache remembers the length, so several contexts may take turns on one model.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin

from scaleinv.hf import rope
from scaleinv.hf.settings import Settings
from scaleinv.rotary import RoPE, yarn

logger = logging.getLogger(__name__)

BASE_TYPES = ("default", "linear", "yarn", "llama3")
"""Rotary types that can be stretched: their frequencies do not depend on the input."""

BETA_FAST, BETA_SLOW = 32.0, 1.0  # as in `scaleinv.rotary.yarn`

_STATE = "scaleinv_stretch"
"""The attribute of the module that holds the rotary modules."""

_LENGTH = "scaleinv_length"
"""The attribute of a cache: the length for which its context was opened."""


@dataclasses.dataclass
class State:
    """What the hooks of a model know."""

    handles: tuple[RemovableHandle, ...] = ()
    fixed: int | None = None
    """The length that `stretch_to` asks for."""
    room: int | None = None
    """Tokens that the running ``generate`` may reach."""
    length: int | None = None
    """The length that the rotary modules are set to; None for the model's own frequencies."""


def register() -> None:
    """Let models that are loaded attach their hooks, and ``generate`` say how long a context will get."""
    PreTrainedModel.post_init = _attaching(PreTrainedModel.post_init)  # type: ignore[method-assign]
    GenerationMixin.generate = _announcing(GenerationMixin.generate)  # type: ignore[method-assign]


def stretch_to(model: PreTrainedModel, length: int | None) -> None:
    """Fix the length for which contexts are opened from now on; None goes back to what each context needs.

    Contexts that are open keep theirs. At or below the trained length nothing is stretched.
    """
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise ValueError(f"length must be a positive number of tokens, or None, got {length!r}")
    found = list(states(model))
    if not found:
        raise ValueError(f"{type(model).__name__} is not converted with stretch='yarn': there is nothing to fix")
    for state in found:
        state.fixed = length


def states(model: nn.Module) -> Iterator[State]:
    """Of each part of a model that is stretched: none for one that is not, and usually one."""
    for module in model.modules():
        state = getattr(module, _STATE, None)
        if state is not None:
            yield state


def train_length(model: PreTrainedModel) -> int:
    """The length beyond which a converted model is stretched."""
    settings = _settings(model.config.get_text_config())
    if settings is None or settings.train_length is None:
        raise ValueError(f"{type(model).__name__} is not converted with a stretch")
    return settings.train_length


def trained_length(config: PreTrainedConfig) -> int:
    """Tokens that a model was trained for, with the scaling that its config already has."""
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 2:
        raise ValueError(f"{config.model_type} does not say max_position_embeddings: give train_length")
    for _, values in rope.flat(config):
        original, factor = values.get("original_max_position_embeddings"), values.get("factor")
        if isinstance(original, int) and isinstance(factor, (int, float)):
            longest = max(longest, int(original * factor))
    return longest


def check(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Raise ValueError unless the model's rotary can be stretched."""
    rope.check(model, config, "stretch=None")
    for layer_type, values in rope.flat(config):
        base = values.get("rope_type", "default")
        if base not in BASE_TYPES:
            where = "" if layer_type is None else f" of {layer_type} layers"
            raise ValueError(
                f"the rotary embedding{where} has type {base!r}, but stretch='yarn' takes {', '.join(BASE_TYPES)}"
            )
    inside = {id(child) for parent in _parents(model, config) for child in parent.children()}
    if any(id(module) not in inside for module in rope.modules(model, config)):
        raise ValueError(f"{type(model).__name__} has rotary modules inside its layers, which stretch does not support")


def attach(model: PreTrainedModel) -> None:
    """Add the hooks, where they are missing, to a model whose config asks for a stretch."""
    config = model.config.get_text_config()
    if _settings(config) is None:
        return
    for parent in _parents(model, config):
        if getattr(parent, _STATE, None) is None:
            handles = (
                parent.register_forward_pre_hook(_open, with_kwargs=True),
                parent.register_forward_hook(_remember, with_kwargs=True),
            )
            setattr(parent, _STATE, State(handles))


def detach(model: PreTrainedModel) -> None:
    """Remove the hooks; `scaleinv.hf.rope.refresh` then brings back the model's own frequencies."""
    for module in model.modules():
        state = getattr(module, _STATE, None)
        if state is not None:
            for handle in state.handles:
                handle.remove()
            delattr(module, _STATE)


def frequencies(
    config: PreTrainedConfig, layer_type: str | None, length: int, train_length: int, attention_factor: bool
) -> tuple[Tensor, float]:
    """A model's frequencies for a context of ``length`` tokens, and the factor of its cos and sin.

    For plain RoPE this is `scaleinv.rotary.yarn`. A model that is already scaled is stretched from where it is: pairs
    that turn over 32 times in ``train_length`` tokens keep the frequency that they have, those under one turn are
    slowed by ``length / train_length``, with a ramp between them.
    """
    values = dict(rope.flat(config))[layer_type]
    base = values.get("rope_type", "default")
    own, factor = rope.base_frequencies(base, config, layer_type)
    if length <= train_length:
        return own, factor
    growth = 0.1 * math.log(length / train_length) + 1 if attention_factor else 1.0
    if base == "default":
        rotary = RoPE(2 * own.numel(), values["rope_theta"])
        return yarn(rotary, length, train_length, attention_factor=False).frequencies, factor * growth
    return slowed(own, length, train_length), factor * growth


def slowed(own: Tensor, length: int, train_length: int) -> Tensor:
    """Any falling frequencies ``[pairs]``, slowed as YaRN slows those of RoPE."""
    own = own.to(torch.float64)
    turns = train_length * own / (2 * math.pi)
    low = max(int((turns > BETA_FAST).sum()) - 1, 0)
    high = int((turns > BETA_SLOW).sum())
    pairs = torch.arange(own.numel(), dtype=torch.float64, device=own.device)
    share = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return (own * (1 - share) + own * (train_length / length) * share).to(torch.float32)


def _settings(config: Any) -> Settings | None:
    """The conversion of a config, if it asks for a stretch."""
    settings = getattr(config, "settings", None)
    return settings if isinstance(settings, Settings) and settings.stretch is not None else None


def _parents(model: PreTrainedModel, config: PreTrainedConfig) -> Iterator[PreTrainedModel]:
    """The models that hold rotary modules."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and any(rope.is_rotary(child, config) for child in module.children()):
            yield module


def _open(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a forward pass: set the rotary modules to the context's length."""
    state, config = getattr(module, _STATE), module.config.get_text_config()
    settings = _settings(config)
    assert settings is not None
    assert settings.train_length is not None
    cache = next((x for x in (*args, *kwargs.values()) if isinstance(x, Cache)), None)
    embedded = kwargs.get("inputs_embeds")
    inputs = embedded if embedded is not None else kwargs.get("input_ids", args[0] if args else None)
    if inputs is None:
        return  # the model says what is missing
    tokens = inputs.shape[1]
    known = getattr(cache, _LENGTH, None)
    compiling = torch.compiler.is_compiling()  # a compiled graph cannot look at positions or at a static cache
    past = 0 if cache is None or compiling else int(cache.get_seq_length())
    if past or (compiling and known is not None):
        length = settings.train_length if known is None else known
        if past + tokens > max(length, settings.train_length):
            _outgrown(cache, known, past + tokens, length)
    elif state.fixed is not None:
        length = state.fixed
    else:
        positions = kwargs.get("position_ids")
        seen = tokens if positions is None or compiling else int(positions.max()) + 1
        length = max(seen, state.room or 0)
    _turn(module, state, config, settings, length)


def _outgrown(cache: Any, known: int | None, tokens: int, length: int) -> None:
    """A context is longer than it was opened for."""
    if known is None:
        raise ValueError(
            f"past_key_values must come from this model, which knows how their keys were turned, got {tokens} tokens "
            "in a cache that another one filled"
        )
    if not getattr(cache, f"{_LENGTH}_warned", False):
        setattr(cache, f"{_LENGTH}_warned", True)
        logger.warning(
            "a context that was opened for %d tokens has %d: it keeps its stretch and gets worse from here on; "
            "open it with room, see scaleinv.hf.stretch_to",
            length,
            tokens,
        )


def _turn(module: Any, state: State, config: PreTrainedConfig, settings: Settings, length: int) -> None:
    assert settings.train_length is not None
    wanted = length if length > settings.train_length else None
    if state.length == wanted:
        return
    for rotary in rope.modules(module, config):
        for layer_type, _ in rope.held(rotary, config):
            if layer_type == "sliding_attention":  # it never looks further than its window
                continue
            found, factor = frequencies(
                config, layer_type, length, settings.train_length, attention_factor=settings.logits == "plain"
            )
            name = rope.names(layer_type)[0]
            rotary.register_buffer(name, found.to(getattr(rotary, name).device, torch.float32), persistent=False)
            setattr(rotary, rope.factor_name(layer_type), factor)
    state.length = wanted


def _remember(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """After a forward pass: note in its cache how the keys were turned."""
    parts = output if isinstance(output, tuple) else tuple(output.values())
    for part in parts:
        if isinstance(part, Cache):
            state, settings = getattr(module, _STATE), _settings(module.config.get_text_config())
            assert settings is not None
            setattr(part, _LENGTH, state.length or settings.train_length)


def _attaching(post_init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(post_init)
    def wrapped(self: Any) -> None:
        post_init(self)
        attach(self)

    return wrapped


def _announcing(generate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate)
    def wrapped(self: Any, inputs: Any = None, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        found = [(state, state.room) for state in states(self)]
        for state, outer in found:  # an assistant, even this model, answers inside of an answer, which has the room
            if outer is None:
                state.room = _room(self, inputs, generation_config, kwargs)
        try:
            return generate(self, inputs, generation_config, *args, **kwargs)
        finally:
            for state, outer in found:
                state.room = outer

    return wrapped


def _room(model: Any, inputs: Any, generation_config: Any, kwargs: dict[str, Any]) -> int:
    """The tokens of the prompt and of the longest answer, by the rules of ``generate``."""
    prompts = (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    prompt = max((x.shape[1] for x in prompts if x is not None), default=1)

    def asked(name: str) -> int | None:
        values = (kwargs.get(name), getattr(generation_config, name, None), getattr(model.generation_config, name))
        return next((x for x in values if x is not None), None)

    new, longest = asked("max_new_tokens"), asked("max_length")
    if new is not None:
        return prompt + new
    if longest is not None:
        return longest
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or prompt + 20
    return min(prompt + 20, max(prompt, limit))  # its default, which it cuts at the model's own length
