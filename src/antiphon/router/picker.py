"""Which worker gets a generation: what the policy needs to know, gathered; what it says, told.

Loads and rates come from the links, counted on with what was sent since the last report. Invariants:
a worker that takes no work is no candidate; one to be avoided is chosen only where there is no other.
The rule itself is a policy's (cost.py, rivals.py). Sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from antiphon.core.errors import NoReplica
from antiphon.core.generation import Generation, Role
from antiphon.router.fleet import Fleet
from antiphon.router.link import WorkerLink
from antiphon.router.policy import NO_OVERLAP, Ask, Overlap, Policy, ReplicaState
from antiphon.router.split import Candidate, Plan, plan, takers


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


@dataclass(frozen=True, slots=True)
class _View:
    """What a choice is made from: workers, their states and what they have of the prompt, in one order."""

    ask: Ask
    links: Sequence[WorkerLink]
    states: Sequence[ReplicaState]
    overlaps: Sequence[Overlap]

    @property
    def candidates(self) -> list[Candidate]:
        """As the choice between one worker and two sees them."""
        infos = [link.info for link in self.links]
        parts = zip(self.states, self.overlaps, infos, strict=True)
        return [Candidate(s, o, info.role, info.namespace) for s, o, info in parts if info is not None]

    @property
    def has_roles(self) -> bool:
        return any(link.info is not None and link.info.role is not Role.BOTH for link in self.links)

    def only(self, numbers: Collection[int]) -> _View:
        """These of them; they keep their numbers in `states`."""
        return _View(
            self.ask,
            [self.links[number] for number in numbers],
            [self.states[number] for number in numbers],
            [self.overlaps[number] for number in numbers],
        )


class Picker:
    """Chooses among the workers of a fleet. `draw` in [0, 1) settles ties."""

    def __init__(self, fleet: Fleet, policy: Policy, draw: Callable[[], float]) -> None:
        self._fleet = fleet
        self._policy = policy
        self._draw = draw

    def plan(self, generation: Generation) -> Pick:
        """The best worker for it, or two where that is cheaper. Raises NoReplica."""
        view = self._view(generation, ())
        if view.has_roles:
            made = plan(view.ask, view.candidates)
            if made.prefill is not None and made.decode is not None:
                return _pick_of_two(view, made, made.prefill, made.decode)
        return self._choose(generation, view)

    def pick(self, generation: Generation, avoid: Collection[WorkerLink] = ()) -> Pick:
        """The best worker for all of it. Raises NoReplica."""
        return self._choose(generation, self._view(generation, avoid))

    def _view(self, generation: Generation, avoid: Collection[WorkerLink]) -> _View:
        ready = [link for link in self._fleet.serving(generation.model) if link.takes_work]
        links = [link for link in ready if link not in avoid] or ready
        states = [link.state(number) for number, link in enumerate(links)]
        return _View(_ask(generation, links), links, states, self._overlaps(generation, links))

    def _choose(self, generation: Generation, view: _View) -> Pick:
        links = view.links
        if view.has_roles:
            view = view.only([c.state.replica for c in takers(view.ask, view.candidates)])
        route = self._policy.choose(view.ask, view.states, view.overlaps, self._draw())
        if route is None:
            raise no_replica(generation.model)
        names = {number: link.name for number, link in enumerate(links)}
        num_uncached = route.num_uncached or len(generation.token_ids)
        return Pick(links[route.replica], num_uncached, route.text(names))

    def _overlaps(self, generation: Generation, links: Sequence[WorkerLink]) -> list[Overlap]:
        return [NO_OVERLAP] * len(links)


def _pick_of_two(view: _View, made: Plan, prefill: int, decode: int) -> Pick:
    ask, lead, link = view.ask, view.links[prefill], view.links[decode]
    num_shared = (ask.num_tokens - 1) // ask.block_tokens * ask.block_tokens
    num_held = view.overlaps[prefill].local_blocks * ask.block_tokens
    return Pick(
        link,
        ask.num_tokens - num_shared,
        f"{link.name} {made.reason} {made.split_s:.3f} by {lead.name}; whole {made.whole_s:.3f}",
        Lead(lead, max(num_shared - num_held, 1), made.prefill_s),
    )


def _ask(generation: Generation, links: Sequence[WorkerLink]) -> Ask:
    block_tokens = next((link.info.block_tokens for link in links if link.info is not None), 1)
    num_answered = len(generation.token_ids) - generation.num_prompt_tokens
    return Ask(
        num_tokens=len(generation.token_ids),
        block_tokens=block_tokens,
        num_answer_tokens=max(generation.sampling.max_tokens - num_answered, 1),
        session=generation.session,
    )
