"""Which replicas are far slower than their like. Pure.

Compared is what workers of one namespace measure of themselves, the time of a step that only decodes: a
worker that shares its cores, or whose clock was throttled, shows there, whatever it was asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

SLOW_FACTOR = 10.0


def slow_ones(step_s: Mapping[str, float]) -> set[str]:
    """Replicas whose step takes more than `SLOW_FACTOR` times the median of the others'. 0: not known yet."""
    known = {replica: seconds for replica, seconds in step_s.items() if seconds > 0}
    found = set()
    for replica, seconds in known.items():
        others = [other_s for other, other_s in known.items() if other != replica]
        if others and seconds > SLOW_FACTOR * median(others):
            found.add(replica)
    return found
