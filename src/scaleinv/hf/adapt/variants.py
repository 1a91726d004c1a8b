"""A pretrained model converted to one of the variants of `scaleinv.adaptation`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedConfig

from scaleinv.adaptation import BASE, AdaptConfig, variant
from scaleinv.data import TokenData
from scaleinv.hf import rope
from scaleinv.hf.adapt.data import load_splits
from scaleinv.hf.convert import conversion, convert, load_tokenizer, revert
from scaleinv.hf.scores import measure_scores
from scaleinv.hf.settings import Fit
from scaleinv.hf.source import load_pretrained
from scaleinv.hf.stretch import trained_length
from scaleinv.progress import Progress, silent

LONGEST = 2048
"""Tokens in a window, unless the user says."""

MEASURED = 8192
"""Tokens on which scores are measured, but at least four windows."""


def as_variant(model: Any, name: str, config: AdaptConfig, train_length: int, fit: Fit | None = None) -> Any:
    """Convert a model, in place, from whatever variant it is to another one.

    Args:
        fit: means and variances of the stock model's scores, for the variants that are fitted to them.
    """
    found = variant(name)
    if found.fitted and fit is None:
        raise ValueError(f"variant {name!r} needs the means and variances of the stock model's scores")
    if conversion(model) is not None:
        revert(model)
    if name == BASE:
        return model
    return convert(
        model,
        logits=found.logits,
        tau=config.tau,
        p=config.p if found.p_rope else None,
        stretch="yarn" if found.stretch else None,
        fit=fit if found.fitted else None,
        train_length=stretched_from(model.config.get_text_config(), train_length) if found.stretch else None,
    )


def stretched_from(config: PreTrainedConfig, train_length: int) -> int:
    """The length beyond which the rotary is stretched: what the model was trained on, before or now."""
    return max(trained_length(config), train_length)


def check_variants(model: Any, config: AdaptConfig, train_length: int) -> None:
    """Raise ValueError for a variant that this model cannot be; the model stays as it is."""
    if conversion(model) is not None:
        raise ValueError(f"{config.model} is converted already ({conversion(model)}): adapt the stock model")
    for name in config.names:
        try:
            as_variant(model, name, config, train_length, _unit(model))
        except ValueError as error:
            raise ValueError(f"variant {name!r} is not possible with {config.model}: {error}") from error
        finally:
            if conversion(model) is not None:
                revert(model)


def measure_fit(model: Any, data: TokenData, length: int) -> Fit:
    """Means and variances of the stock model's scores on some windows of a text, at most as long as it was trained."""
    length = min(length, getattr(model.config.get_text_config(), "max_position_embeddings", None) or length)
    return measure_scores(model, data.batch(0, max(4, MEASURED // length), length, seed=0)[0])


def fit_to_text(source: str, text: str, progress: Progress = silent) -> Fit:
    """`measure_fit` of the model in a folder or on the hub, on text as `scaleinv adapt` takes it."""
    model, tokenizer = load_pretrained(source).eval(), load_tokenizer(source)
    if tokenizer is None:
        raise ValueError(f"{source} has no tokenizer, which the text needs")
    data = load_splits(text, None, tokenizer, model.config.get_text_config().vocab_size, progress=progress).train
    return measure_fit(model, data, min(LONGEST, max(3, data.total // 8)))


def _unit(model: Any) -> Fit:
    """Means of 0 and variances of 1."""
    text = model.config.get_text_config()
    shape = text.num_hidden_layers, text.num_attention_heads
    return torch.zeros(shape), torch.ones(shape)


def check_lengths(config: PreTrainedConfig, lengths: Iterable[int], source: str) -> None:
    """Raise ValueError for a length beyond a table of positions, which a model without a rotary has."""
    table = getattr(config, "max_position_embeddings", None)
    with contextlib.suppress(StopIteration):
        next(rope.flat(config))
        return
    if getattr(config, "alibi", False) or table is None:
        return
    longest = max(lengths)
    if longest > table:
        raise ValueError(
            f"{source} ({config.model_type}) has learned positions for {table:,} tokens and no rotary embedding: "
            f"train_length and lengths cannot go beyond that, got {longest:,}"
        )
