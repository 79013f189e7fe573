"""Which worker gets a generation: what the policy needs to know, gathered; what it says, told.

Loads and rates come from the links, counted on with what was sent since the last report. Invariants:
a worker that takes no work is no candidate; one to be avoided is chosen only where there is no other.
The rule itself is a policy's (cost.py, rivals.py). Sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from antiphon.core.errors import NoReplica
from antiphon.core.generation import Generation
from antiphon.router.fleet import Fleet
from antiphon.router.link import WorkerLink
from antiphon.router.policy import NO_OVERLAP, Ask, Overlap, Policy


def no_replica(model: str) -> NoReplica:
    """The error for a model that nobody serves now."""
    return NoReplica(f"No worker serves the model {model!r} at the moment; try again shortly.")


@dataclass(frozen=True, slots=True)
class Pick:
    """A worker for a generation, the tokens it is expected to compute there, and why, for people."""

    link: WorkerLink
    num_uncached: int
    route: str


class Picker:
    """Chooses among the workers of a fleet. `draw` in [0, 1) settles ties."""

    def __init__(self, fleet: Fleet, policy: Policy, draw: Callable[[], float]) -> None:
        self._fleet = fleet
        self._policy = policy
        self._draw = draw

    def pick(self, generation: Generation, avoid: Collection[WorkerLink] = ()) -> Pick:
        """The best worker for it. Raises NoReplica."""
        takers = [link for link in self._fleet.serving(generation.model) if link.takes_work]
        links = [link for link in takers if link not in avoid] or takers
        states = [link.state(number) for number, link in enumerate(links)]
        overlaps = self._overlaps(generation, links)
        route = self._policy.choose(_ask(generation, links), states, overlaps, self._draw())
        if route is None:
            raise no_replica(generation.model)
        names = {number: link.name for number, link in enumerate(links)}
        num_uncached = route.num_uncached or len(generation.token_ids)
        return Pick(links[route.replica], num_uncached, route.text(names))

    def _overlaps(self, generation: Generation, links: Sequence[WorkerLink]) -> list[Overlap]:
        return [NO_OVERLAP] * len(links)


def _ask(generation: Generation, links: Sequence[WorkerLink]) -> Ask:
    block_tokens = next((link.info.block_tokens for link in links if link.info is not None), 1)
    num_answered = len(generation.token_ids) - generation.num_prompt_tokens
    return Ask(
        num_tokens=len(generation.token_ids),
        block_tokens=block_tokens,
        num_answer_tokens=max(generation.sampling.max_tokens - num_answered, 1),
        session=generation.session,
    )
