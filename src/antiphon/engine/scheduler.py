"""Who gets how many tokens in the next step.

One token budget a step. Running sequences come first: those that need one token (decode), then
those that catch up (prefill, in chunks, oldest first). What is left admits waiting sequences by
class, then arrival, if blocks for all their tokens and one more are available. When a running
sequence needs a block and none is left, the one admitted last is preempted: its blocks stay cached
under their hashes, it waits at the head of its class and catches up later.

A waiting sequence whose next block is being computed by a running one waits for it (identical
prompts are computed once). Running ones never wait, so nobody waits in a circle. A held sequence
waits for blocks from elsewhere until it is let go; those behind it pass, but those whose next block
it is waiting for wait with it, so that nothing is computed that is about to come.

Pure: no clock, no runner. `schedule` says what was opened, preempted and evicted; the engine does it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain as chain_iterables

from antiphon.core.blockhash import BlockHash
from antiphon.engine.blocks import BlockManager
from antiphon.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Slice:
    """`num_tokens` of a sequence, from its `num_computed` on."""

    sequence: Sequence
    num_tokens: int


@dataclass(slots=True)
class StepPlan:
    """What a step does, in this order: preempt, drop, open, run."""

    slices: list[Slice] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)
    opened: list[Sequence] = field(default_factory=list)

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens among the slices. Ask before they are marked computed."""
        left = ((s.num_tokens, s.sequence.num_prompt_tokens - s.sequence.num_computed) for s in self.slices)
        return sum(max(0, min(count, prompt)) for count, prompt in left)


class Scheduler:
    """Waiting and running sequences. The caller adds, removes and marks blocks computed."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        block_tokens: int,
        token_budget: int,
        max_running: int,
        share: bool = True,
    ) -> None:
        if token_budget < max_running:
            raise ValueError(f"token budget {token_budget} is below {max_running} sequences")
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.token_budget = token_budget
        self.max_running = max_running
        self._share = share  # False: no block gets a hash, so none is found
        self.running: list[Sequence] = []  # in order of admission
        self._waiting: dict[int, list[Sequence]] = {}  # by class; each in order of service
        self._in_flight: dict[BlockHash, Sequence] = {}  # full block being computed or fetched -> by whom

    @property
    def waiting(self) -> list[Sequence]:
        """All waiting sequences in order of service."""
        return list(chain_iterables.from_iterable(self._waiting[c] for c in sorted(self._waiting)))

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self.running) or any(not self._must_wait(s, self.hits(s)) for s in self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait behind the others of its class."""
        self._waiting.setdefault(sequence.generation.priority, []).append(sequence)

    def hold(self, sequence: Sequence) -> bool:
        """Hold a waiting sequence back, if blocks are missing that nobody else is about to bring."""
        hits = self.hits(sequence)
        missing = sequence.hashes[len(hits) : sequence.num_usable_blocks]
        if self._share and any(block_hash not in self._in_flight for block_hash in missing):
            sequence.is_held = True
            self._claim(sequence, missing)
            self.blocks.refresh(hits)  # what comes is of no use without them
        return sequence.is_held

    def let_go(self, sequence: Sequence) -> None:
        """What a held sequence waited for is here, or will not come. Fine for one that is not held."""
        if sequence.is_held:
            sequence.is_held = False
            self._unclaim(sequence)

    def hits(self, sequence: Sequence) -> list[int]:
        """The leading blocks of a waiting sequence that are here, but never all of its tokens."""
        return self.blocks.find_prefix(sequence.extend_hashes()[: sequence.num_usable_blocks])

    def remove(self, sequence: Sequence) -> bool:
        """Forget a sequence wherever it is and release its blocks. True if it was running (and so open)."""
        queue = self._waiting.get(sequence.generation.priority, [])
        if sequence in queue:
            queue.remove(sequence)
            self.let_go(sequence)
            return False
        self.running.remove(sequence)
        self._release(sequence)
        return True

    def schedule(self) -> StepPlan:
        """Plan one step. Admissions and preemptions are in force when it returns."""
        plan = StepPlan()
        budget = self._plan_running(plan)
        self._admit(plan, budget)
        return plan

    def mark_computed(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Account for tokens a step computed. Returns (index, block) of the blocks that became full."""
        sequence.num_computed += num_tokens
        kept: list[tuple[int, int]] = []
        num_full = sequence.num_computed // self.block_tokens
        if self._share and num_full > sequence.num_kept:
            hashes = sequence.extend_hashes()
            for index in range(sequence.num_kept, num_full):
                owner = sequence.owner_at(index)
                block = self.blocks.register(sequence.block_table[index], hashes[index], owner)
                sequence.block_table[index] = block
                kept.append((index, block))
                if self._in_flight.get(hashes[index]) is sequence:
                    del self._in_flight[hashes[index]]
            sequence.num_kept = num_full
        return kept

    def _plan_running(self, plan: StepPlan) -> int:
        """Slices for running sequences; returns what is left of the budget."""
        budget = self.token_budget
        decodes_first = sorted(self.running, key=lambda s: s.num_to_compute > 1)
        for sequence in decodes_first:
            if budget == 0:
                break
            if sequence in plan.preempted:  # preempted for another one of this step
                continue
            count = min(sequence.num_to_compute, budget)
            if self._make_room(sequence, sequence.num_computed + count, plan):
                plan.slices.append(Slice(sequence, count))
                budget -= count
        return budget

    def _make_room(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Blocks for `num_tokens`, preempting the latest if need be; False if that was itself."""
        missing = -(-num_tokens // self.block_tokens) - len(sequence.block_table)
        while missing > self.blocks.num_available:
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        if missing > 0:
            sequence.block_table += self.blocks.allocate(missing, plan.evicted)
        return True

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        self.running.remove(victim)
        self._release(victim)
        victim.num_computed = 0
        victim.num_kept = 0
        self._waiting.setdefault(victim.generation.priority, []).insert(0, victim)
        plan.slices = [s for s in plan.slices if s.sequence is not victim]
        plan.preempted.append(victim)

    def _release(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.block_table)
        sequence.block_table = []
        self._unclaim(sequence)

    def _claim(self, sequence: Sequence, hashes: list[BlockHash]) -> None:
        """The sequence will bring these blocks; who claimed one first is waited for."""
        for block_hash in hashes:
            self._in_flight.setdefault(block_hash, sequence)

    def _unclaim(self, sequence: Sequence) -> None:
        for block_hash in sequence.hashes:
            if self._in_flight.get(block_hash) is sequence:
                del self._in_flight[block_hash]

    def _admit(self, plan: StepPlan, budget: int) -> None:
        if plan.preempted:  # blocks are short: let the running ones finish
            return
        for priority in sorted(self._waiting):
            queue = self._waiting[priority]
            index = 0
            while index < len(queue) and budget > 0 and len(self.running) < self.max_running:
                sequence = queue[index]
                hits = self.hits(sequence)
                if self._must_wait(sequence, hits):
                    index += 1
                    continue
                if not self._open(sequence, hits, plan):
                    return  # no room: those behind it must not overtake it for ever
                queue.pop(index)
                count = min(sequence.num_to_compute, budget)
                plan.slices.append(Slice(sequence, count))
                budget -= count

    def _must_wait(self, sequence: Sequence, hits: list[int]) -> bool:
        """Held, or its next block is on the way at another one."""
        if sequence.is_held or len(hits) >= sequence.num_usable_blocks:
            return sequence.is_held
        return self._in_flight.get(sequence.hashes[len(hits)], sequence) is not sequence

    def _open(self, sequence: Sequence, hits: list[int], plan: StepPlan) -> bool:
        num_needed = len(sequence.tokens) // self.block_tokens + 1 - len(hits)
        if num_needed > self.blocks.num_available - self.blocks.num_cached_of(hits):
            return False
        self.blocks.acquire(hits)
        sequence.block_table = hits + self.blocks.allocate(num_needed, plan.evicted)
        sequence.num_kept = len(hits)
        sequence.num_computed = len(hits) * self.block_tokens
        sequence.count_hits(len(hits))
        if self._share:
            self._claim(sequence, sequence.hashes[len(hits) :])
        self.running.append(sequence)
        plan.opened.append(sequence)
        return True
