"""What a gateway knows of its workers, kept ready for the choice between them.

Owns the directory of blocks and, by model and role, the index of loads; both are brought up to date by
what links say, so that a choice looks at few workers however many there are. Invariants: a worker that
takes no work is in no index; one that is down has no blocks. Chooses nothing and sends nothing but the
wish for a snapshot of blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from antiphon.core.clock import Clock
from antiphon.core.generation import Generation, Role, WorkerInfo
from antiphon.core.wire import Blocks
from antiphon.router.candidates import NUM_HOLDERS, Candidates
from antiphon.router.directory import BlockDirectory
from antiphon.router.link import WorkerLink
from antiphon.router.lookup import Lookup
from antiphon.router.policy import Ask, Overlap, ReplicaState
from antiphon.router.prompthash import PromptKeys
from antiphon.router.room import Room, room_of


class Family(NamedTuple):
    """Workers between which blocks can be exchanged."""

    namespace: str
    block_tokens: int


@dataclass(frozen=True, slots=True)
class View:
    """What one choice is made from: states of candidates, and what each has of the prompt, in their order."""

    ask: Ask
    links: Mapping[int, WorkerLink]  # by replica
    states: Sequence[ReplicaState]
    overlaps: Sequence[Overlap]
    has_roles: bool = False  # False: every worker is for both, prompts and answers

    def only(self, replicas: Collection[int]) -> View:
        """These candidates alone."""
        kept = [place for place, state in enumerate(self.states) if state.replica in replicas]
        return View(
            self.ask,
            self.links,
            [self.states[place] for place in kept],
            [self.overlaps[place] for place in kept],
            self.has_roles,
        )


@dataclass(slots=True)
class _Model:
    """The workers that serve one model: loads by role, how many of each family are up."""

    by_role: dict[Role, Candidates] = field(default_factory=dict)
    families: Counter[Family] = field(default_factory=Counter)


class Survey:
    """The workers of one gateway. `draw` in [0, 1) is asked for what is left to chance.

    `shows_all`: views are of all workers, not of a few of many.
    """

    def __init__(self, clock: Clock, draw: Callable[[], float], *, shows_all: bool = False) -> None:
        self.directory = BlockDirectory()
        self._clock = clock
        self._draw = draw
        self._shows_all = shows_all
        self._links: dict[int, WorkerLink] = {}  # those that are up, by replica
        self._infos: dict[int, WorkerInfo] = {}  # as they were counted
        self._models: dict[str, _Model] = {}
        self.on_news: Callable[[WorkerLink, str], None] | None = None  # a worker of a model came, went, spoke

    def link_is_up(self, link: WorkerLink) -> None:
        """A worker has said who it is."""
        assert link.info is not None
        self._links[link.replica] = link
        self._infos[link.replica] = link.info
        self.directory.join(link.replica, link.life, self._clock.now())
        model = self._models.setdefault(link.info.model, _Model())
        model.families[_family(link.info)] += 1
        self.load_changed(link)

    def link_is_down(self, link: WorkerLink) -> None:
        """A worker is lost."""
        info = self._infos.pop(link.replica, None)
        if info is None:
            return
        del self._links[link.replica]
        self.directory.leave(link.replica)
        model = self._models[info.model]
        self._candidates(info).remove(link.replica)
        model.families[_family(info)] -= 1
        if not model.families.total():
            del self._models[info.model]
        if self.on_news is not None:
            self.on_news(link, info.model)

    def load_changed(self, link: WorkerLink) -> None:
        """It reported, was sent something, or may not be sent anything any more."""
        info = self._infos.get(link.replica)
        if info is None:
            return
        if link.takes_work:
            self._candidates(info).update(link.state())
        else:
            self._candidates(info).remove(link.replica)
        if self.on_news is not None:
            self.on_news(link, info.model)

    def takes(self, model: str) -> bool:
        """Whether a worker of this model takes work that is to be answered."""
        return bool(self._answering(model))

    def rooms(self, model: str) -> Iterator[Room]:
        """At each worker that answers, about the least busy first. Must not be changed meanwhile."""
        for candidates in self._answering(model):
            for state in candidates.from_least_busy():
                if self._links[state.replica].takes_work:
                    yield room_of(state, self._infos[state.replica].block_tokens)

    def room(self, link: WorkerLink) -> Room | None:
        """At this worker; None where it takes nothing now."""
        info = self._infos.get(link.replica)
        if info is None or not link.takes_work or self._candidates(info) not in self._answering(info.model):
            return None
        return room_of(link.state(), info.block_tokens)

    def take_blocks(self, link: WorkerLink, news: Blocks) -> None:
        """A worker says what has become of its blocks."""
        if self.directory.take(link.replica, news, self._clock.now()):
            link.resync()

    def view(self, generation: Generation, avoid: Collection[WorkerLink] = ()) -> View:
        """Candidates for a generation; those to avoid only where there is nobody else."""
        model = self._models.get(generation.model)
        if model is None:
            return View(Ask(len(generation.token_ids), 1), {}, (), ())
        lookups = self._look_up(generation, model)
        held = [held for lookup in lookups.values() for held in lookup.holders(NUM_HOLDERS, self._draw())]
        holders = [replica for replica, _ in sorted(held, key=lambda pair: -pair[1])]
        barred = {link.replica for link in avoid}
        states = self._ready(model, holders, barred) or self._ready(model, holders, ())
        block_tokens = next(iter(lookups)).block_tokens
        overlaps = self._overlaps(lookups, states, dict(held))
        has_roles = model.by_role.keys() != {Role.BOTH}
        return View(_ask(generation, block_tokens), self._links, states, overlaps, has_roles)

    def _overlaps(
        self, lookups: Mapping[Family, Lookup], states: Sequence[ReplicaState], held: Mapping[int, int]
    ) -> list[Overlap]:
        if len(lookups) == 1:
            (lookup,) = lookups.values()
            return [_overlap(lookup, state, held) for state in states]
        return [_overlap(lookups[_family(self._infos[state.replica])], state, held) for state in states]

    def _ready(self, model: _Model, holders: Sequence[int], avoid: Collection[int]) -> list[ReplicaState]:
        """A few that take work at this moment."""
        few = [state for candidates in model.by_role.values() for state in candidates.few(holders, avoid)]
        return [state for state in few if self._links[state.replica].takes_work]

    def _look_up(self, generation: Generation, model: _Model) -> dict[Family, Lookup]:
        now = self._clock.now()
        return {
            family: self.directory.look_up(_keys(generation, family), now)
            for family, num_up in model.families.items()
            if num_up
        }

    def _answering(self, model: str) -> list[Candidates]:
        """Of the workers that are not for prompts only; of all, where there are no others."""
        known = self._models.get(model)
        by_role = {} if known is None else {role: those for role, those in known.by_role.items() if those}
        return [those for role, those in by_role.items() if role is not Role.PREFILL] or [*by_role.values()]

    def _candidates(self, info: WorkerInfo) -> Candidates:
        by_role = self._models[info.model].by_role
        if info.role not in by_role:
            by_role[info.role] = Candidates(self._draw, yields_all=self._shows_all)
        return by_role[info.role]


def _family(info: WorkerInfo) -> Family:
    return Family(info.namespace, info.block_tokens)


def _keys(generation: Generation, family: Family) -> PromptKeys:
    try:
        namespace = bytes.fromhex(family.namespace)
    except ValueError:  # no worker of ours: it has no blocks that we could name
        return PromptKeys(generation, b"", 0)
    return PromptKeys(generation, namespace, family.block_tokens)


def _overlap(lookup: Lookup, state: ReplicaState, held: Mapping[int, int]) -> Overlap:
    """`held`: what the best holders are known to have."""
    num_local = held.get(state.replica)
    if num_local is None:
        num_local = lookup.local(state.replica)
    reaches_store = state.rates.store_blocks_per_s > 0
    return Overlap(num_local, lookup.in_store(num_local) if reaches_store else 0)


def _ask(generation: Generation, block_tokens: int) -> Ask:
    num_answered = len(generation.token_ids) - generation.num_prompt_tokens
    return Ask(
        num_tokens=len(generation.token_ids),
        block_tokens=max(block_tokens, 1),
        num_answer_tokens=max(generation.sampling.max_tokens - num_answered, 1),
        session=generation.session,
    )
