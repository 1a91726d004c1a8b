"""`convert`, `revert` and `convert_folder`: an existing model, with scale-invariant attention."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel

from scaleinv import schedule
from scaleinv.hf import config as configs
from scaleinv.hf import rope
from scaleinv.hf import stretch as stretching
from scaleinv.hf.settings import Fit, HeadFactors, Logits, Settings, Stretch, calibration_rows, fit_rows
from scaleinv.hf.source import load_pretrained
from scaleinv.hub import reason


def convert(
    model: PreTrainedModel,
    *,
    tau: float = schedule.TAU,
    p: float | None = 0.5,
    logits: Logits = "scale-invariant",
    train_length: int | None = None,
    calibration: HeadFactors | None = None,
    stretch: Stretch | None = None,
    fit: Fit | None = None,
) -> PreTrainedModel:
    """Give a decoder-only model scale-invariant attention, in place; the weights stay as they are.

    Of a composite model (vision and text, say) only the text part changes. A model that is already converted raises
    ValueError: `revert` it first. If anything raises, the model is as it was.

    Args:
        model: any transformers model whose attention goes through `AttentionInterface`.
        tau: lengthscale in tokens, for scale-invariant logits.
        p: fraction of the rotary channel pairs that keep turning; the others, of low frequency, are set to frequency 0
            (p-RoPE). None leaves the rotary embedding as it is.
        logits: "scale-invariant"; or, to compare with, "plain" (so p-RoPE alone) and "logn": the scores times
            ``log(n) / log(train_length)`` for a query that sees n keys, which is plain attention at n = train_length.
        train_length: tokens in a training sequence, for "logn" and for a stretch; None for the config's
            ``max_position_embeddings``, or what its rotary scaling extends them to.
        calibration: factors of the scores, a tensor ``[layers, query heads]`` or a mapping from layer to
            ``[query heads]``; None for 1.
        stretch: "yarn" slows the model's own rotary (so ``p=None``) by YaRN's frequencies in contexts longer than
            ``train_length``, without YaRN's attention factor, because the logits sharpen with the distance already;
            with ``logits="plain"`` it is YaRN with that factor. Each context is stretched once, when it is opened: see
            `scaleinv.hf.stretch` and `stretch_to`.
        fit: means and variances of the scores, each ``[layers, query heads]``, as `scaleinv.hf.measure_scores` gives
            them: the scale-invariant logits of each head are made for scores like these, where the paper's are made
            for mean 0 and variance 1. Models that were trained without QK-norm are far from that.

    Returns:
        The model itself.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers model, got {type(model).__name__} (convert before wrapping it)")
    text = _convertible(model)
    if calibration is not None:
        calibration = calibration_rows(calibration, text.num_hidden_layers, text.num_attention_heads)
    mean, variance = (None, None)
    if fit is not None:
        mean, variance = fit_rows(fit, text.num_hidden_layers, text.num_attention_heads)
    lengthened = logits == "logn" or stretch is not None
    if lengthened and train_length is None:
        train_length = text.max_position_embeddings if stretch is None else stretching.trained_length(text)
    settings = Settings(
        logits=logits,
        tau=float(tau),
        p=None if p is None else float(p),
        train_length=train_length if lengthened else None,
        calibration=calibration,
        score_mean=mean,
        score_variance=variance,
        stock_attention=text._attn_implementation,
        stretch=stretch,
    )
    if p is not None:
        rope.check(model, text)
    if stretch is not None:
        stretching.check(model, text)
    _set_attention(model, text, configs.ATTENTION)
    try:
        configs.apply(model.config, settings)
        if p is not None:
            rope.refresh(model, text)
            rope.try_out(model, text)
        stretching.attach(model)
    except Exception:
        if conversion(model) is not None:
            configs.remove(model.config)
            rope.refresh(model, text)
        _set_attention(model, text, settings.stock_attention)
        raise
    return model


def revert(model: PreTrainedModel, *, attn_implementation: str | None = None) -> PreTrainedModel:
    """Undo `convert`, in place: the stock attention and rotary embedding, with the weights as they are now.

    Args:
        attn_implementation: None for what the model had when it was converted. If that is not available, ValueError is
            raised and the model stays converted.
    """
    if conversion(model) is None:
        raise ValueError(f"{type(model).__name__} is not converted: there is nothing to revert")
    settings = configs.remove(model.config)
    text = model.config.get_text_config()
    wanted = attn_implementation or settings.stock_attention
    try:
        _set_attention(model, text, wanted)
    except (ImportError, ValueError) as error:
        configs.apply(model.config, settings)
        raise ValueError(
            f"attn_implementation={wanted!r} is not available for this model, pass another one: {error}"
        ) from error
    stretching.detach(model)
    if settings.p is not None or settings.stretch is not None:
        rope.refresh(model, text)
    return model


def conversion(model: PreTrainedModel) -> Settings | None:
    """How the model was converted; None for a stock model."""
    text = model.config.get_text_config()
    return text.settings if isinstance(text, configs.Converted) else None


def convert_folder(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tau: float = schedule.TAU,
    p: float | None = 0.5,
    **options: Any,
) -> None:
    """Load a causal language model from a folder or the hub, `convert` it, save it with its tokenizer, if it has one.

    ``options`` go to `convert`.
    """
    if Path(out).exists() and not Path(out).is_dir():
        raise ValueError(f"out must be a folder, got the file {os.fspath(out)}")
    if Path(out).exists() and any(Path(out).iterdir()):
        raise ValueError(f"out must be a new or an empty folder, got {os.fspath(out)}")
    model = load_pretrained(source)
    convert(model, tau=tau, p=p, **options)
    tokenizer = load_tokenizer(source)
    model.save_pretrained(out)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)


def load_tokenizer(source: str | os.PathLike[str]) -> Any:
    """The tokenizer that goes with a model; None for a folder without one."""
    folder = Path(source)
    if folder.is_dir() and not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
        return None
    try:
        return AutoTokenizer.from_pretrained(source)
    except ImportError:
        raise
    except Exception as error:  # whatever the libraries make of a damaged file
        raise ValueError(f"the tokenizer of {os.fspath(source)} cannot be loaded: {reason(error)}") from error


def _convertible(model: PreTrainedModel) -> PreTrainedConfig:
    """The config of the text part; ValueError if the model cannot be converted."""
    name = type(model).__name__
    if conversion(model) is not None:
        raise ValueError(f"{name} is already converted ({conversion(model)}): call scaleinv.hf.revert(model) first")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder: only decoder-only models can be converted")
    text = model.config.get_text_config()
    if getattr(text, "is_causal", True) is False:
        raise ValueError(f"{name} is bidirectional (config.is_causal=False): only causal attention can be converted")
    rotary = getattr(text, "rope_parameters", None) or {}
    if any("mrope_section" in part for part in (rotary, *rotary.values()) if isinstance(part, dict)):
        raise ValueError(f"{name} has a multimodal rotary embedding (M-RoPE, 3-D position_ids), which is not supported")
    layers = [module for module in model.modules() if uses_interface(module)]
    if not any(module.config is text for module in layers):
        raise ValueError(f"{name} does not take its attention from transformers' AttentionInterface")
    for module in layers:
        where = f"{type(module).__name__} in {name}"
        if type(module.config) is type(text) and module.config is not text:
            raise ValueError(f"{where} holds its own copy of the config, which is not supported")
        if module.config is text and getattr(module, "is_causal", True) is False:
            raise ValueError(f"{where} is bidirectional: only causal attention can be converted")
    return text


def uses_interface(module: Any) -> bool:
    """Whether it is an attention layer that asks transformers' AttentionInterface for its function."""
    is_layer = "Attention" in type(module).__name__ and hasattr(module, "config")
    return is_layer and hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS")


def _set_attention(model: PreTrainedModel, text: PreTrainedConfig, implementation: str) -> None:
    """Set it through transformers, which knows whether the model can; then only for the text part."""
    if text is model.config:
        model.set_attn_implementation(implementation)
    else:
        names = [name for name in model.config.sub_configs if getattr(model.config, name) is text]
        model.set_attn_implementation(dict.fromkeys(names, implementation))
    if text._attn_implementation != implementation:
        raise ValueError(f"transformers cannot set the attention of {type(model).__name__}")
