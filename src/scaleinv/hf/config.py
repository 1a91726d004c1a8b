"""How a converted model's config differs: it insists on our attention, and it says so in config.json.

In memory a converted config is an instance of a subclass of the model's own config class, so that everything that
looks at it (generation, PEFT, Trainer) sees the model that it knows. On disk it has a model type of its own. Whoever
loads the folder without scaleinv, be it transformers or another engine, meets a type that they do not know and stops,
where they would otherwise have run a model that was trained with scale-invariant attention as a plain one.
"""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from scaleinv.hf import rope
from scaleinv.hf.settings import Settings
from scaleinv.logits import LogitTransform

ATTENTION = "scaleinv"
"""The name in transformers' attention and mask interfaces."""

MODEL_TYPE = "scaleinv.hf"
"""The model type in config.json; transformers' error about an unknown type names it: it is what to import."""

STOCK_TYPE = "stock_model_type"
"""Where the model's own type stands in config.json. (Not "model_type": stock classes search the file for that.)"""

ARCHITECTURE = "ScaleInvariant"
"""Before the names in ``architectures``, which some engines go by."""

MARKER = "scaleinv (import scaleinv.hf and load the model with an Auto class)"
"""What config.json names as ``attn_implementation`` and as ``transformers_weights``, the file of the weights.

Neither exists, so a model's own class stops there; at the second where the caller chooses another attention."""


class Saved:
    """Mixin of the outermost config: writes and reads the form on disk."""

    def to_json_string(self, use_diff: bool = True) -> str:
        values = json.loads(super().to_json_string(use_diff))  # type: ignore[misc]
        values["scaleinv"] = {**values.get("scaleinv", {}), STOCK_TYPE: values["model_type"]}
        values["model_type"] = MODEL_TYPE
        if values.get("architectures"):
            values["architectures"] = [ARCHITECTURE + name for name in values["architectures"]]
        values["transformers_weights"] = MARKER
        return json.dumps(values, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        if config_dict.get("model_type") == MODEL_TYPE:
            return restore(config_dict, **kwargs)
        settings = getattr(cls, "settings", None)
        if settings is not None and settings.p is None:  # what to_dict made of it
            config_dict = copy.deepcopy(config_dict)
            rope.unwrap(config_dict.get("rope_parameters"))
        return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]

    def validate(self) -> None:
        """The base class knows the stock rotary types only: show it the stock config."""
        stock: Any = copy.deepcopy(self)
        remove(stock)
        stock.validate()

    def __reduce__(self) -> tuple:
        base, settings = type(self).__bases__[-1], getattr(type(self), "settings", None)
        return _blank, (base, settings), self.__dict__


class Converted(Saved):
    """Mixin of the config that the attention layers hold: always our attention."""

    settings: Settings
    logit_transforms: tuple[LogitTransform, ...]

    def to_dict(self) -> dict[str, Any]:
        """With marks: a stock config that is made of it, or holds it as a part, must not pass for one."""
        values = {**super().to_dict(), "attn_implementation": MARKER}  # type: ignore[misc]
        if self.settings.p is None:
            rope.mark(values.get("rope_parameters"))
        return values

    @property
    def _attn_implementation_internal(self) -> str:
        return ATTENTION

    @_attn_implementation_internal.setter
    def _attn_implementation_internal(self, value: str | None) -> None:
        if value not in (None, ATTENTION, MARKER):
            raise ValueError(
                f"this model is converted to {self.settings.logits} attention and cannot run with "
                f"attn_implementation={value!r}: call scaleinv.hf.revert(model) first"
            )


class ScaleInvariantConfig(PreTrainedConfig):
    """What transformers finds under MODEL_TYPE: it gives way to the model's own config class."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return restore(config_dict, **kwargs)


def register() -> None:
    """Make MODEL_TYPE known to transformers."""
    AutoConfig.register(MODEL_TYPE, ScaleInvariantConfig, exist_ok=True)


def apply(config: PreTrainedConfig, settings: Settings) -> None:
    """Turn a stock config into a converted one, in place, so that whoever holds it sees the change."""
    outer: Any = config
    text: Any = config.get_text_config()
    if settings.p is not None:
        rope.wrap(text, settings.p)
    text.__dict__.pop("_attn_implementation_internal", None)
    text.__class__ = _converted_class(text.__class__, settings)
    text.scaleinv = settings.to_dict()
    if outer is not text:
        outer.__class__ = _saved_class(outer.__class__)


def remove(config: PreTrainedConfig) -> Settings:
    """Undo `apply`."""
    text: Any = config.get_text_config()
    settings = text.settings
    for part in {id(text): text, id(config): config}.values():
        part.__class__ = type(part).__bases__[-1]
    del text.scaleinv
    rope.unwrap(getattr(text, "rope_parameters", None))
    text._attn_implementation_internal = None
    return settings


def restore(config_dict: dict[str, Any], **kwargs: Any) -> Any:
    """A converted config from the form on disk; the result as that of `PreTrainedConfig.from_dict`."""
    requested = kwargs.pop("attn_implementation", None)
    if requested not in (None, ATTENTION, MARKER):
        raise ValueError(
            f"the checkpoint is converted by scaleinv.hf and cannot be loaded with attn_implementation={requested!r}; "
            "load it without that argument, and call scaleinv.hf.revert(model) for the stock model"
        )
    values = copy.deepcopy(config_dict)
    values["model_type"] = values["scaleinv"].pop(STOCK_TYPE)
    values.pop("transformers_weights", None)
    if values.get("architectures"):
        values["architectures"] = [name.removeprefix(ARCHITECTURE) for name in values["architectures"]]
    settings: Settings | None = None
    for part in [values, *values.values()]:
        if isinstance(part, dict) and "scaleinv" in part:
            stored = part.pop("scaleinv")
            settings = Settings.from_dict(stored) if stored else settings
            part.pop("attn_implementation", None)
            rope.unwrap(part.get("rope_parameters"))
    if settings is None:
        raise ValueError("config.json names the model type of scaleinv.hf but holds no conversion settings")
    result = CONFIG_MAPPING[values["model_type"]].from_dict(values, **kwargs)
    apply(result[0] if isinstance(result, tuple) else result, settings)
    return result


# The subclasses have their base's name: the Auto classes look a model up by the name of its config's class.


@functools.cache
def _converted_class(base: Any, settings: Settings) -> type:
    return type(base.__name__, (Converted, base), {"settings": settings, "logit_transforms": settings.transforms()})


@functools.cache
def _saved_class(base: Any) -> type:
    return type(base.__name__, (Saved, base), {})


def _blank(base: type, settings: Settings | None) -> Any:
    """For copy and pickle."""
    cls: Any = _saved_class(base) if settings is None else _converted_class(base, settings)
    return object.__new__(cls)
