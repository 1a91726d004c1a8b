"""Methods by name: each is a rotary encoding and a logit transform, a row of the paper's table.

>>> method = get("scale-invariant-p-rope", heads=6, head_dim=128)
>>> method.rotary, method.logits
(PRoPE(dim=128, turning=32 of 64 pairs), ScaleInvariant(tau=10.0, alpha=1.64872, beta=1.64872, learnable=False))
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, get_args

from scaleinv.constants import TAU

if TYPE_CHECKING:  # the names alone are torch-free: `scaleinv --help` shows them
    from scaleinv.logits import LogitTransform
    from scaleinv.rotary import Rotary


Stretch = Literal["ntk", "yarn", "yarn-frequencies"]
"""Dynamic NTK, YaRN, or YaRN's frequencies without its attention factor."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What a method's name stands for, before it is sized for a model."""

    rotary: Literal["rope", "p-rope", "none"]
    logits: Literal["plain", "logn", "alibi", "scale-invariant"]
    stretch: Stretch | None = None
    """How a RoPE-trained model's rotary is changed at inference beyond the training length."""
    trained_as: str | None = None
    """The method whose trained model this one uses; None for itself."""
    infini: bool = False
    """Infini-attention: local segments and a compressive memory (`scaleinv.model.infini`)."""


ROWS: dict[str, Row] = {
    "rope": Row("rope", "plain"),
    "p-rope": Row("p-rope", "plain"),
    "nope": Row("none", "plain"),
    "rope+ntk": Row("rope", "plain", stretch="ntk", trained_as="rope"),
    "yarn": Row("rope", "plain", stretch="yarn", trained_as="rope"),
    "logn+rope": Row("rope", "logn"),
    "logn+p-rope": Row("p-rope", "logn"),
    "logn+ntk": Row("rope", "logn", stretch="ntk", trained_as="logn+rope"),
    "alibi": Row("none", "alibi"),
    "scale-invariant-p-rope": Row("p-rope", "scale-invariant"),
    "scale-invariant-rope": Row("rope", "scale-invariant"),
    "scale-invariant-nope": Row("none", "scale-invariant"),
    "infini-rope": Row("rope", "plain", infini=True),
    "infini-p-rope": Row("p-rope", "plain", infini=True),
    # Beyond the paper. YaRN without its factor shows what that factor does for plain attention.
    "yarn-no-factor": Row("rope", "plain", stretch="yarn-frequencies", trained_as="rope"),
    # These logits already sharpen with the length, so YaRN's factor would do it twice.
    "scale-invariant-rope+yarn": Row(
        "rope", "scale-invariant", stretch="yarn-frequencies", trained_as="scale-invariant-rope"
    ),
    "scale-invariant-rope+ntk": Row("rope", "scale-invariant", stretch="ntk", trained_as="scale-invariant-rope"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoding:
    """A method without its logit transform: what all layers of a model share."""

    name: str
    rotary: Rotary
    train_length: int
    trained_as: str
    """The method whose trained model this one uses: its own name, unless it only acts at inference."""
    stretch: Stretch | None = None
    infini: bool = False
    """The model must run Infini-attention around the (local) logits."""

    def rotary_for(self, length: int) -> Rotary:
        """The rotary encoding for a context of ``length`` tokens: `rotary`, unless NTK or YaRN stretches it."""
        if self.stretch is None:
            return self.rotary
        from scaleinv.rotary import RoPE, ntk, yarn

        changes: dict[str, Callable[[RoPE, int, int], Rotary]] = {
            "ntk": ntk,
            "yarn": yarn,
            "yarn-frequencies": functools.partial(yarn, attention_factor=False),
        }
        _check(self.name, "stretch", self.stretch, changes)
        assert isinstance(self.rotary, RoPE)
        return changes[self.stretch](self.rotary, length, self.train_length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method(Encoding):
    """A method sized for a model."""

    logits: LogitTransform

    @property
    def encoding(self) -> Encoding:
        """The method without its logit transform, which may hold weights that belong to one layer."""
        return Encoding(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Encoding)})


def names() -> list[str]:
    """All methods: the paper's in its order, then those beyond it."""
    return list(ROWS)


def row(name: str) -> Row:
    """What a method's name stands for; an unknown name raises ValueError with the closest matches."""
    if name not in ROWS:
        close = difflib.get_close_matches(str(name), ROWS, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(ROWS)}"
        raise ValueError(f"unknown method {name!r}: {hint}")
    return ROWS[name]


def trained_as(name: str) -> str:
    """The method whose trained model ``name`` uses: itself, unless it only acts at inference.

    >>> trained_as("yarn"), trained_as("alibi")
    ('rope', 'alibi')
    """
    return row(name).trained_as or name


def get(
    name: str,
    *,
    heads: int,
    head_dim: int,
    train_length: int = 4096,
    tau: float = TAU,
    rope_base: float = 10_000.0,
    p: float = 0.5,
    p_rope_base: float | None = None,
    learnable_tau: bool = False,
) -> Method:
    """The method ``name`` for a model of ``heads`` query heads of ``head_dim`` channels.

    Args:
        train_length: tokens in a training sequence: where NTK and YaRN start to act, and p-RoPE's scale.
        tau: lengthscale of the scale-invariant methods, in tokens.
        rope_base: base of RoPE.
        p: fraction of the channel pairs that p-RoPE turns.
        p_rope_base: base of p-RoPE; None for ``train_length / 4``, the paper's 1024 at 4,096 tokens.
        learnable_tau: learn a lengthscale for each head, starting at ``tau``.
    """
    from scaleinv.logits import ALiBi, LogN, Plain, ScaleInvariant
    from scaleinv.rotary import NoPE, PRoPE, RoPE

    found = row(name)
    if train_length < 1:
        raise ValueError(f"train_length must be positive, got {train_length}")
    if found.rotary == "p-rope" and p_rope_base is None and train_length <= 4:
        raise ValueError(f"train_length must exceed 4 for p-RoPE's base of train_length / 4, got {train_length}")
    rotaries: dict[str, Callable[[], Rotary]] = {
        "rope": lambda: RoPE(head_dim, rope_base),
        "p-rope": lambda: PRoPE(head_dim, p, train_length / 4 if p_rope_base is None else p_rope_base),
        "none": NoPE,
    }
    transforms: dict[str, Callable[[], LogitTransform]] = {
        "plain": Plain,
        "logn": lambda: LogN(heads),
        "alibi": lambda: ALiBi(heads),
        "scale-invariant": lambda: ScaleInvariant(tau, heads=heads if learnable_tau else None, learnable=learnable_tau),
    }
    _check(name, "rotary", found.rotary, rotaries)
    _check(name, "logits", found.logits, transforms)
    if found.stretch is not None:
        _check(name, "stretch", found.stretch, get_args(Stretch))
    return Method(
        name=name,
        rotary=rotaries[found.rotary](),
        logits=transforms[found.logits](),
        train_length=train_length,
        trained_as=trained_as(name),
        stretch=found.stretch,
        infini=found.infini,
    )


def _check(name: str, field: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ValueError(f"method {name!r} has {field}={value!r}, which must be one of {', '.join(known)}")
