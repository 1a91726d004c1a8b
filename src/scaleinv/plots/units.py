"""What a loss is measured in: nats per byte or per token of a named tokenizer, and bits per byte."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

NAMES = {"gpt2": "GPT-2 token", "bytes": "byte"}


@dataclasses.dataclass(frozen=True)
class Unit:
    """A loss is in nats per ``token``."""

    token: str = "token"
    bytes_per_token: float | None = None
    """Measured on the validation text; None if unknown."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Unit:
        """From the ``tokens`` of a summary's settings: ``{"tokenizer": "bytes", "bytes_per_token": 1.0}``.

        >>> Unit.of({"tokens": {"tokenizer": "bytes"}})
        Unit(token='byte', bytes_per_token=1.0)
        >>> Unit.of({"tokens": {"tokenizer": "gpt2"}}).loss
        'loss (nats per GPT-2 token)'
        """
        tokens = settings.get("tokens")
        tokens = tokens if isinstance(tokens, Mapping) else {}
        name = tokens.get("tokenizer", settings.get("tokenizer"))
        if not isinstance(name, str):
            return cls()
        size = 1.0 if name == "bytes" else tokens.get("bytes_per_token")
        known = isinstance(size, (int, float)) and not isinstance(size, bool) and math.isfinite(size) and size > 0
        short = name.rstrip("/").rpartition("/")[2]
        return cls(NAMES.get(name, f"{short} token"), float(size) if known and size is not None else None)

    @property
    def nats(self) -> str:
        return f"nats per {self.token}"

    @property
    def loss(self) -> str:
        return f"loss ({self.nats})"

    def bits_per_byte(self, nats: float) -> float | None:
        """A loss in bits per byte of text; None if the length of the tokens is unknown."""
        return None if self.bytes_per_token is None else nats / math.log(2) / self.bytes_per_token
