"""p-RoPE for a model that is already trained: its own frequencies, the low ones set to zero.

transformers keeps a model's rotary type in ``config.rope_parameters`` and computes the frequencies from it whenever the
model is built. So p-RoPE is our own family of types, "scaleinv-<base type>": first the base type, with any scaling
that it does, then zeros in the tail. (transformers' own "proportional" type drops the scaling.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

PREFIX = "scaleinv-"
BASE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "proportional")


def register() -> None:
    """Make the types known to transformers."""
    for base in BASE_TYPES:
        ROPE_INIT_FUNCTIONS[PREFIX + base] = _p_rope(base)


def wrap(config: PreTrainedConfig, p: float) -> None:
    """Switch ``config.rope_parameters`` to p-RoPE; ValueError if that is not possible."""
    parameters = list(flat(config))
    if not parameters:
        raise ValueError(f"{config.model_type} has no rotary embedding to change: convert with p=None")
    for layer_type, values in parameters:
        base = values.get("rope_type", "default")
        where = "" if layer_type is None else f" of {layer_type} layers"
        if base not in BASE_TYPES:
            raise ValueError(
                f"the rotary embedding{where} has type {base!r}, but p-RoPE takes {', '.join(BASE_TYPES)}: "
                "convert with p=None to leave it as it is"
            )
    for _, values in parameters:
        values.update(rope_type=PREFIX + values.get("rope_type", "default"), p=p)


def mark(parameters: dict[str, Any] | None) -> None:
    """Rename the types in a ``rope_parameters`` dictionary, nested by layer type or not, so that only we know them."""
    for values in _typed(parameters):
        if not values["rope_type"].startswith(PREFIX):
            values["rope_type"] = PREFIX + values["rope_type"]


def unwrap(parameters: dict[str, Any] | None) -> None:
    """Undo `wrap` or `mark` on a ``rope_parameters`` dictionary."""
    for values in _typed(parameters):
        if values["rope_type"].startswith(PREFIX):
            values["rope_type"] = values["rope_type"].removeprefix(PREFIX)
            values.pop("p", None)


def _typed(parameters: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    for values in [parameters, *(parameters or {}).values()]:
        if isinstance(values, dict) and isinstance(values.get("rope_type"), str):
            yield values


def refresh(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Recompute the frequencies of all rotary modules of the model that use ``config``, in float32."""
    for module in modules(model, config):
        kinds = held(module, config)
        for layer_type, values in kinds:
            compute: Any = ROPE_INIT_FUNCTIONS.get(values["rope_type"]) or module.compute_default_rope_parameters
            frequencies, factor = compute(config, **({} if layer_type is None else {"layer_type": layer_type}))
            setattr(module, factor_name(layer_type), factor)
            for name in names(layer_type):
                device = getattr(module, name).device
                module.register_buffer(name, frequencies.to(device, torch.float32, copy=True), persistent=False)
        types = {layer_type: values["rope_type"] for layer_type, values in kinds}
        module.rope_type = types.get(None, types)


def check(model: PreTrainedModel, config: PreTrainedConfig, remedy: str = "p=None") -> None:
    """Raise ValueError unless we can recompute the frequencies that the model's rotary modules hold."""
    found = list(modules(model, config))
    if not found:
        raise ValueError(f"no rotary module found in {type(model).__name__}: convert with {remedy}")
    for module in found:
        kinds = held(module, config)
        if not kinds or not all(_known(module, config, *pair) for pair in kinds):
            raise ValueError(
                f"{type(module).__name__} does not compute its frequencies from config.rope_parameters as other models "
                f"do: convert with {remedy} to leave them as they are"
            )


def try_out(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Raise ValueError if a rotary module does not work with its new type."""
    for module in modules(model, config):
        for layer_type, _ in held(module, config):
            frequencies = getattr(module, names(layer_type)[0])
            options = {} if layer_type is None else {"layer_type": layer_type}
            try:
                module(
                    frequencies[None, None], torch.zeros(1, 1, dtype=torch.long, device=frequencies.device), **options
                )
            except Exception as error:  # the model's own code may raise anything
                raise ValueError(
                    f"{type(module).__name__} does not work with p-RoPE ({type(error).__name__}: {error}): "
                    "convert with p=None"
                ) from error


def _known(module: Any, config: PreTrainedConfig, layer_type: str | None, values: dict[str, Any]) -> bool:
    """Whether the module holds the frequencies that we compute."""
    base = values["rope_type"]
    if base not in BASE_TYPES:
        return True  # `wrap` refuses, and says why
    own = getattr(module, "rope_type", base)
    if (own.get(layer_type) if isinstance(own, dict) else own) != base:
        return False
    frequencies = getattr(module, names(layer_type)[base == "dynamic"])  # those of before any input
    try:
        expected = base_frequencies(base, config, layer_type)[0]
    except Exception:  # for example, a config that has no single head_dim
        return False
    return torch.equal(expected.to(frequencies), frequencies)


def _p_rope(base: str) -> Callable[..., tuple[Tensor, float]]:
    def compute(
        config: PreTrainedConfig,
        device: torch.device | None = None,
        seq_len: int | None = None,
        layer_type: str | None = None,
        **_: Any,
    ) -> tuple[Tensor, float]:
        if not hasattr(config, "logit_transforms"):
            raise ValueError(
                "a model converted by scaleinv.hf must be loaded with an Auto class of transformers, and if it is part "
                "of another model, converted as a whole"
            )
        frequencies, attention_factor = base_frequencies(base, config, layer_type, device, seq_len)
        p = dict(flat(config))[layer_type]["p"]
        kept = round(p * frequencies.numel())
        frequencies[kept:] = 0.0
        return frequencies, attention_factor

    return compute


def base_frequencies(
    base: str,
    config: PreTrainedConfig,
    layer_type: str | None,
    device: torch.device | None = None,
    seq_len: int | None = None,
) -> tuple[Tensor, float]:
    """The frequencies of a rotary type of transformers, and the factor of its cos and sin."""
    if base != "default":
        return ROPE_INIT_FUNCTIONS[base](config, device, seq_len=seq_len, layer_type=layer_type)
    values = dict(flat(config))[layer_type]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dim = int(head_dim * values.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, dim, 2, dtype=torch.float) / dim
    return (1.0 / values["rope_theta"] ** exponents).to(device), 1.0


def is_rotary(module: nn.Module, config: PreTrainedConfig) -> bool:
    """Whether it is a rotary module that uses ``config``."""
    return getattr(module, "config", None) is config and "RotaryEmbedding" in type(module).__name__


def modules(model: nn.Module, config: PreTrainedConfig) -> Iterator[Any]:
    """The rotary modules of a model that use ``config``."""
    return (module for module in model.modules() if is_rotary(module, config))


def held(module: nn.Module, config: PreTrainedConfig) -> list[tuple[str | None, dict[str, Any]]]:
    """`flat`, of the layer types that occur in the model."""
    return [(layer_type, values) for layer_type, values in flat(config) if hasattr(module, names(layer_type)[0])]


def flat(config: PreTrainedConfig) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """(layer type, parameters) pairs; the layer type is None if all layers share the parameters."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = {key: value for key, value in parameters.items() if isinstance(value, dict)}
    if nested:
        yield from nested.items()
    elif parameters:
        yield None, parameters


def names(layer_type: str | None) -> tuple[str, str]:
    """The buffers of a rotary module: the frequencies in use, and those of before any input."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    return f"{prefix}inv_freq", f"{prefix}original_inv_freq"


def factor_name(layer_type: str | None) -> str:
    """The attribute of a rotary module that multiplies its cos and sin."""
    return "attention_scaling" if layer_type is None else f"{layer_type}_attention_scaling"
