"""Counter-based randomness: a draw is a pure function of (seed, choice, position), and of the id.

A seed therefore gives the same draws whatever else is in the batch, whichever worker computes
them, and after a failover in mid-answer. Nothing here keeps state.
"""

from __future__ import annotations

import secrets
import struct

from blake3 import blake3

_DRAW = struct.Struct("<qII")
_MANTISSA_BITS = 53


def draw_key(seed: int, choice: int, position: int) -> int:
    """64 bits from which all draws for answer position `position` of choice `choice` are made.

    `seed` is any signed 64-bit integer; `choice` and `position` are below 2**32.
    """
    return int.from_bytes(blake3(_DRAW.pack(seed, choice, position)).digest(length=8), "little")


def fresh_seed() -> int:
    """A seed for a request that brought none: below 2**53, so that JavaScript clients keep it whole."""
    return secrets.randbits(_MANTISSA_BITS)
