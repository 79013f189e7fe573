"""Which models a request to a route is for, in the order in which they are tried. Pure.

Each target is drawn with the probability of its weight (weighted rendezvous hashing): requests of one
session fall to one target for as long as the weights stay, and a changed weight moves no more sessions
than it must. The targets that were not drawn come next, in the order in which they would have been,
then the route's fallbacks.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from blake3 import blake3

from antiphon.core.catalogue import RouteEntry, TargetEntry

_BITS = 53


def session_key(tenant: str, *names: str | None) -> bytes:
    """What holds the requests of one session together: its tenant and the first name it goes by.

    Empty where it has no name: such requests are drawn one by one.
    """
    name = next((name for name in names if name), None)
    return b"" if name is None else b"\0".join((tenant.encode(), name.encode()))


def ordered_models(route: RouteEntry, session: bytes, draw: float) -> list[str]:
    """Every model that may answer, best first. `draw` in [0, 1) decides where there is no session."""
    key = session or struct.pack("<d", draw)
    ranked = sorted(route.targets, key=lambda target: _score(route, target, key), reverse=True)
    return list(dict.fromkeys([*(target.model for target in ranked), *route.fallback]))


def mirror_model(route: RouteEntry, draw: float) -> str | None:
    """The model that gets a copy of this request, if it is one of those that are copied."""
    return route.mirror.model if route.mirror is not None and draw < route.mirror.share else None


def names_of(routes: Sequence[RouteEntry]) -> dict[str, RouteEntry]:
    """Routes by name and alias."""
    return {name: route for route in routes for name in (route.name, *route.aliases)}


def _score(route: RouteEntry, target: TargetEntry, key: bytes) -> float:
    """The one with the greatest is drawn: with probability weight / sum of weights."""
    parts = (route.name.encode(), target.model.encode(), key)
    digest = blake3(b"".join(struct.pack("<I", len(part)) + part for part in parts)).digest(length=8)
    uniform = ((int.from_bytes(digest, "little") >> (64 - _BITS)) + 0.5) / (1 << _BITS)
    return -target.weight / math.log(uniform)
