"""Which worker gets a generation, or which two: what is known of them put before the rules.

Invariants: a worker that takes no work is no candidate; one to be avoided is chosen only where there is
no other. The rules are a policy's (cost.py, rivals.py) and split.py's; what is known is survey.py's.
Sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from antiphon.core.errors import NoReplica
from antiphon.core.generation import Generation
from antiphon.router.link import WorkerLink
from antiphon.router.policy import Policy
from antiphon.router.split import Candidate, Plan, plan, takers
from antiphon.router.survey import Survey, View


def no_replica(model: str) -> NoReplica:
    """The error for a model that nobody serves now."""
    return NoReplica(f"No worker serves the model {model!r} at the moment; try again shortly.")


@dataclass(frozen=True, slots=True)
class Lead:
    """A worker that computes a prompt before another answers it; the tokens, and the seconds expected."""

    link: WorkerLink
    num_uncached: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Pick:
    """A worker for a generation, the tokens it is expected to compute there, and why, for people.

    `prefill`: who computes the prompt before. None: it is computed there.
    """

    link: WorkerLink
    num_uncached: int
    route: str
    prefill: Lead | None = None


class Picker:
    """Chooses among the workers that a survey knows. `draw` in [0, 1) settles ties."""

    def __init__(self, survey: Survey, policy: Policy, draw: Callable[[], float]) -> None:
        self._survey = survey
        self._policy = policy
        self._draw = draw

    def plan(self, generation: Generation) -> Pick:
        """The best worker for it, or two where that is cheaper. Raises NoReplica."""
        view = self._survey.view(generation)
        if view.has_roles and view.states:
            made = plan(view.ask, _candidates(view))
            if made.prefill is not None and made.decode is not None:
                return _pick_of_two(view, made, made.prefill, made.decode)
        return self._choose(generation, view)

    def pick(self, generation: Generation, avoid: Collection[WorkerLink] = ()) -> Pick:
        """The best worker for all of it; one of `avoid` only where there is no other. Raises NoReplica."""
        return self._choose(generation, self._survey.view(generation, avoid))

    def _choose(self, generation: Generation, view: View) -> Pick:
        if view.has_roles:
            view = view.only({c.state.replica for c in takers(view.ask, _candidates(view))})
        route = self._policy.choose(view.ask, view.states, view.overlaps, self._draw())
        if route is None:
            raise no_replica(generation.model)
        num_uncached = route.num_uncached or len(generation.token_ids)
        return Pick(
            view.links[route.replica], num_uncached, route.text(lambda replica: view.links[replica].name)
        )


def _candidates(view: View) -> list[Candidate]:
    """As the choice between one worker and two sees them."""
    found = []
    for state, overlap in zip(view.states, view.overlaps, strict=True):
        info = view.links[state.replica].info
        assert info is not None  # a link that is down is in no view
        found.append(Candidate(state, overlap, info.role, info.namespace))
    return found


def _pick_of_two(view: View, made: Plan, prefill: int, decode: int) -> Pick:
    ask, lead, link = view.ask, view.links[prefill], view.links[decode]
    num_shared = (ask.num_tokens - 1) // ask.block_tokens * ask.block_tokens
    (there,) = view.only({prefill}).overlaps
    num_held = there.local_blocks * ask.block_tokens
    return Pick(
        link,
        ask.num_tokens - num_shared,
        f"{link.name} {made.reason} {made.split_s:.3f} by {lead.name}; whole {made.whole_s:.3f}",
        Lead(lead, max(num_shared - num_held, 1), made.prefill_s),
    )
