"""Counter-based randomness: a draw is a pure function of (seed, choice, position).

A seed therefore gives the same draws whatever else is in the batch, whichever worker computes
them, and after a failover in mid-answer. Nothing here keeps state.
"""

from __future__ import annotations

import secrets
import struct

from blake3 import blake3

_DRAW = struct.Struct("<qII")
_MANTISSA_BITS = 53


def uniform(seed: int, choice: int, position: int) -> float:
    """The draw in [0, 1) for answer position `position` of choice `choice`.

    `seed` is any signed 64-bit integer; `choice` and `position` are below 2**32.
    """
    digest = blake3(_DRAW.pack(seed, choice, position)).digest(length=8)
    return (int.from_bytes(digest, "little") >> (64 - _MANTISSA_BITS)) / (1 << _MANTISSA_BITS)


def fresh_seed() -> int:
    """A seed for a request that brought none: below 2**53, so that JavaScript clients keep it whole."""
    return secrets.randbits(_MANTISSA_BITS)
