"""Do all ranks ask for the same? They compare before they exchange anything else, so that a mistake is an error.

Without it a rank with other shapes would hang, and one with another lengthscale would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scaleinv.distributed.exchange import all_parts

COLUMNS = 32
"""Numbers that each rank sends: the same for every call, so that ranks in different calls can compare too."""

PRIME = (1 << 31) - 1
CHUNK = 1 << 20
"""Elements of a parameter that a fingerprint takes at once."""


class Choice(NamedTuple):
    """One of several things, named in errors."""

    value: object
    among: Sequence[object]


def check_agreement(
    mesh: DeviceMesh, function: str, values: Mapping[str, float | Choice], device: torch.device
) -> None:
    """Raise ValueError on every rank, naming what differs, unless all ranks of the mesh call it with the same values.

    Args:
        function: what the ranks are about to do.
        values: by name; the names must be the same wherever the function is.
        device: where the ranks can exchange tensors.
    """
    if mesh.size() == 1:
        return
    numbers = [x.among.index(x.value) if isinstance(x, Choice) else x for x in values.values()]
    own = torch.tensor([crc32(function.encode()), *numbers], dtype=torch.float64)
    padded = nn.functional.pad(own, (0, COLUMNS - len(own))).to(device)
    table = torch.stack(all_parts(padded, mesh)).T.tolist()  # [columns][ranks]
    if len(set(table[0])) > 1:
        raise ValueError(f"all ranks of the mesh must call the same function, this one called {function}")
    for found, (name, value) in zip(table[1:], values.items(), strict=False):
        if len(set(found)) > 1:
            among = value.among if isinstance(value, Choice) else None
            shown = ", ".join(f"{x:.15g}" if among is None else str(among[int(x)]) for x in found)
            raise ValueError(f"{name} must be the same on every rank of the mesh, got [{shown}] on ranks 0, 1, …")


def fingerprint(module: nn.Module) -> int:
    """A checksum of a module's class, its plain settings, and every bit of its parameters and buffers.

    It does not depend on the device or the number of threads.
    """
    words = []
    for name, part in module.named_modules():
        settings = {key: x for key, x in vars(part).items() if key[0] != "_" and key != "training" and _is_plain(x)}
        words.append(f"{name} {type(part).__qualname__} {sorted(settings.items())}")
    total = crc32("\n".join(words).encode())
    for tensor in (*module.parameters(), *module.buffers()):
        for piece in tensor.detach().flatten().split(CHUNK):
            bits = piece.to(torch.float64).view(torch.int64)
            odd = 2 * torch.arange(len(bits), device=bits.device) + 1  # so that the order counts
            total = (31 * total + int((bits * odd).sum())) % PRIME  # sums of integers: exact, modulo 2^64
    return total


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(x) for x in value)
    return value is None or isinstance(value, (bool, int, float, str))
