"""A random order of windows that needs no list of them.

The order is a keyed bijection of 0 … size - 1: a Feistel network (Luby and Rackoff, 1988) over the smallest domain
of 4^n that holds them all. A place outside 0 … size - 1 is sent through the network again until it falls inside
("cycle walking", Black and Rogaway, 2002); the domain is less than four times as large, so this ends soon. It uses
only integers and a hash, so every machine computes the same order.
"""

from __future__ import annotations

import hashlib

_ROUNDS = 8  # 4 make a strong permutation of a large domain; a small one needs more


def shuffled(index: int, size: int, seed: int, epoch: int) -> int:
    """Which of ``size`` windows is number ``index`` of an epoch's random order.

    For a fixed ``size``, ``seed`` and ``epoch`` every window comes up exactly once.

    >>> [shuffled(index, 5, seed=0, epoch=0) for index in range(5)]
    [1, 4, 0, 3, 2]
    """
    if not 0 <= index < size:
        raise ValueError(f"index must lie in 0 … size - 1, got index {index} and size {size}")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    place = _permuted(index, half, seed, epoch)
    while place >= size:
        place = _permuted(place, half, seed, epoch)
    return place


def _permuted(place: int, half: int, seed: int, epoch: int) -> int:
    """The Feistel network: a bijection of the numbers of ``2 * half`` bits, different for every seed and epoch."""
    mask = (1 << half) - 1
    left, right = place >> half, place & mask
    for turn in range(_ROUNDS):
        text = f"{seed},{epoch},{turn},{right}".encode()
        digest = hashlib.blake2b(text, digest_size=16).digest()
        left, right = right, left ^ int.from_bytes(digest, "little") & mask
    return left << half | right
