"""Block sizes, warps and pipeline stages of each kernel, for each GPU, head dimension and width of the dtype.

Chosen by compiling, not by timing: of the sizes that fit a target's registers and shared memory, the largest tile.
`scaleinv doctor --aot` prints what each one compiles to.
"""

from __future__ import annotations

import dataclasses

KERNELS = ("forward", "keys-values", "queries", "tables", "decode")
TARGETS = ("sm_80", "sm_90", "sm_120", "gfx942")
HEAD_DIMS = (16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Config:
    """How a kernel is cut: queries and keys in a tile, warps in a program, stages of its pipeline.

    Decoding takes fewer queries than block_m where a GQA group has fewer.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int


def choose(kernel: str, target: str, head_dim: int, item_bytes: int) -> Config:
    """The configuration for a padded head dimension (the larger of key's and value's) and the bytes of an element."""
    if target.startswith("gfx"):
        return (_AMD_FLOAT32 if item_bytes == 4 else _AMD)[kernel][head_dim]
    table = _FLOAT32 if item_bytes == 4 else _HOPPER if target in ("sm_90", "sm_100", "sm_103") else _AMPERE
    if table is _AMPERE and target == "sm_80" and (kernel, head_dim) == ("forward", 128):
        return Config(128, 32, 4, 3)  # four warps read keys and values half as often as eight; later targets spill
    if table is _AMPERE and target != "sm_80" and head_dim == 256:
        return _SMALL[kernel]
    return table[kernel][head_dim]


def precision(target: str, item_bytes: int) -> str:
    """How tensor cores multiply float32: on NVIDIA GPUs, which have none for it, as three tf32 products."""
    return "tf32x3" if item_bytes == 4 and target.startswith("sm_") else "ieee"


def gather(target: str) -> str:
    """How entries of the table are read: on NVIDIA GPUs a plain load would go through shared memory."""
    return "ptx" if target.startswith("sm_") else "load"


def shipped() -> list[tuple[str, str, int, int]]:
    """Every (kernel, target, head dim, element bytes)."""
    return [(k, t, d, b) for k in KERNELS for t in TARGETS for b in (2, 4) for d in HEAD_DIMS]


def _by_head_dim(small: Config, *larger: Config) -> dict[int, Config]:
    return dict(zip(HEAD_DIMS, (small, small, *larger), strict=True))


_AMPERE = {
    "forward": _by_head_dim(Config(128, 64, 4, 3), Config(128, 64, 8, 3), Config(128, 64, 8, 3), Config(64, 64, 8, 2)),
    "keys-values": _by_head_dim(
        Config(64, 128, 8, 2), Config(64, 128, 8, 2), Config(32, 64, 4, 2), Config(32, 64, 8, 2)
    ),
    "queries": _by_head_dim(Config(128, 64, 8, 2), Config(128, 64, 8, 2), Config(64, 64, 4, 2), Config(64, 32, 4, 2)),
    "tables": _by_head_dim(Config(64, 64, 8, 2), Config(64, 64, 8, 2), Config(32, 32, 4, 1), Config(32, 32, 4, 1)),
    "decode": _by_head_dim(Config(32, 128, 4, 2), Config(32, 128, 4, 2), Config(32, 64, 4, 2), Config(16, 64, 4, 1)),
}
_HOPPER = _AMPERE | {
    "forward": _by_head_dim(
        Config(128, 128, 8, 2), Config(128, 128, 8, 2), Config(128, 128, 8, 2), Config(128, 64, 8, 2)
    ),
    "keys-values": _by_head_dim(
        Config(64, 128, 8, 2), Config(64, 128, 8, 2), Config(64, 128, 8, 2), Config(32, 64, 8, 2)
    ),
    "queries": _by_head_dim(Config(128, 64, 8, 2), Config(128, 64, 8, 2), Config(128, 64, 8, 2), Config(64, 32, 4, 2)),
}
# Head dimension 256 on GPUs with 99 KB of shared memory: 8.6, 8.9, 12.0.
_SMALL = {
    "forward": Config(64, 32, 4, 2),
    "keys-values": Config(32, 32, 4, 1),
    "queries": Config(64, 32, 4, 1),
    "tables": Config(32, 32, 4, 1),
    "decode": Config(16, 64, 4, 1),
}
_FLOAT32 = {
    "forward": _by_head_dim(Config(64, 32, 4, 2), Config(64, 32, 4, 2), Config(32, 32, 8, 1), Config(16, 16, 8, 1)),
    "keys-values": _by_head_dim(Config(32, 32, 4, 1), Config(16, 32, 4, 1), Config(16, 16, 4, 1), Config(16, 16, 8, 1)),
    "queries": _by_head_dim(Config(32, 32, 4, 2), Config(32, 32, 4, 1), Config(32, 16, 4, 1), Config(16, 16, 8, 1)),
    "tables": _by_head_dim(Config(32, 32, 4, 2), Config(32, 32, 4, 1), Config(16, 16, 1, 1), Config(16, 16, 1, 1)),
    "decode": _by_head_dim(Config(32, 64, 4, 2), Config(32, 32, 4, 2), Config(16, 32, 4, 2), Config(16, 32, 8, 1)),
}
# On gfx942 a program may have 64 KB of shared memory, and a thread 512 registers with four warps (of 64 threads).
_AMD = {
    "forward": _by_head_dim(Config(128, 64, 4, 2), Config(128, 64, 4, 2), Config(128, 64, 4, 2), Config(128, 32, 4, 2)),
    "keys-values": _by_head_dim(Config(64, 64, 4, 1), Config(64, 64, 4, 1), Config(64, 64, 4, 1), Config(32, 64, 4, 1)),
    "queries": _by_head_dim(Config(128, 64, 8, 1), Config(128, 64, 8, 1), Config(64, 64, 4, 1), Config(64, 32, 4, 1)),
    "tables": _by_head_dim(Config(64, 64, 8, 1), Config(64, 64, 8, 1), Config(64, 64, 8, 1), Config(32, 32, 4, 1)),
    "decode": _by_head_dim(Config(32, 128, 4, 1), Config(32, 128, 4, 1), Config(32, 128, 4, 1), Config(16, 64, 4, 1)),
}
_AMD_FLOAT32 = {
    "forward": _by_head_dim(Config(128, 64, 4, 2), Config(128, 64, 4, 2), Config(128, 32, 4, 2), Config(64, 32, 4, 1)),
    "keys-values": _by_head_dim(Config(64, 64, 4, 1), Config(64, 64, 4, 1), Config(32, 64, 4, 1), Config(16, 32, 4, 1)),
    "queries": _by_head_dim(Config(128, 64, 8, 1), Config(64, 64, 4, 1), Config(64, 64, 4, 1), Config(32, 16, 4, 1)),
    "tables": _by_head_dim(Config(64, 64, 8, 1), Config(64, 64, 8, 1), Config(32, 32, 4, 1), Config(32, 32, 4, 1)),
    "decode": _by_head_dim(Config(32, 128, 4, 1), Config(32, 64, 4, 1), Config(16, 64, 4, 1), Config(16, 32, 4, 1)),
}
