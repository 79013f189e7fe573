"""Which worker gets a generation: what the policy needs to know, gathered; what it says, carried out.

Owns no state of its own: loads come from the links. The rule itself is policy.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from antiphon.core.errors import NoReplica
from antiphon.core.generation import Generation
from antiphon.router.fleet import Fleet
from antiphon.router.link import WorkerLink
from antiphon.router.policy import choose


def no_replica(model: str) -> NoReplica:
    """The error for a model that nobody serves now."""
    return NoReplica(f"No worker serves the model {model!r} at the moment; try again shortly.")


class Picker:
    """Chooses among the workers of a fleet. `draw` in [0, 1) settles ties."""

    def __init__(self, fleet: Fleet, draw: Callable[[], float]) -> None:
        self._fleet = fleet
        self._draw = draw

    def pick(self, generation: Generation, avoid: Collection[WorkerLink] = ()) -> WorkerLink:
        """The best worker for it; one of `avoid` only where there is no other. Raises NoReplica."""
        takers = [link for link in self._fleet.serving(generation.model) if link.takes_work]
        candidates = [link for link in takers if link not in avoid] or takers
        index = choose([link.replica_load() for link in candidates], self._draw())
        if index is None:
            raise no_replica(generation.model)
        return candidates[index]
