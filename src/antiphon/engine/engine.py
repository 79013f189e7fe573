"""The engine: generations in, step outputs out. `step` is schedule → run → commit.

Owns the sequences of one model on one runner. Pure and synchronous: no thread, no network, no wall
clock; whoever holds it calls from one thread. Every choice that was added ends in exactly one
output with `finish` set, whatever happens: answer complete, abort, deadline, failed step.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from antiphon.core.blockhash import BlockHash
from antiphon.core.clock import Clock
from antiphon.core.errors import BadRequest, Busy, ContextTooLong
from antiphon.core.generation import Generation, KvReport, Load, StepOutput, Terminal, TokenLogprobs
from antiphon.core.kvblock import KvBlock, Prefix
from antiphon.engine.blocks import BlockManager, HashChanges
from antiphon.engine.counters import Counters, StepReport
from antiphon.engine.handover import Arrival, Handover, OfferRule
from antiphon.engine.runner import Chunk, Logits, ModelRunner, RunnerFault
from antiphon.engine.sampling import BadLogits, Chosen, Sampler, choose_batch
from antiphon.engine.scheduler import Scheduler, Slice, StepPlan
from antiphon.engine.sequence import Chain, Sequence, Supply, check_borders, prompt_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How much the engine holds and how much a step may do."""

    num_blocks: int
    namespace: bytes = b""  # enters the block hashes
    checkpoint_blocks: int | None = None  # offer an answer's blocks this often; None: offer none at all
    offers_early: bool = False  # every prompt's blocks while later ones are computed, not only a prefill's
    token_budget: int = 256  # most tokens a step computes: bounds how long a decode waits for a prefill
    max_waiting: int = 1024  # sequences


class Engine:
    """Continuous batching of generations on a `ModelRunner`."""

    def __init__(self, runner: ModelRunner, settings: EngineSettings, clock: Clock) -> None:
        self.runner = runner
        self.counters = Counters()
        self.last_step = StepReport()
        self._settings = settings
        self._clock = clock
        self._scheduler = Scheduler(
            BlockManager(settings.num_blocks),
            block_tokens=runner.block_tokens,
            token_budget=settings.token_budget,
            max_running=runner.max_sequences,
            share=runner.shares_blocks,
        )
        rule = OfferRule(settings.checkpoint_blocks, settings.offers_early)
        self._handover = Handover(self._scheduler.blocks, runner, self.counters, rule)
        self._keys = itertools.count()
        self._open: dict[str, list[Sequence]] = {}  # unfinished choices by generation id
        self._held: dict[str, Supply] = {}  # by generation id, while it waits for blocks from elsewhere
        self._most_tokens = min(runner.context_tokens, settings.num_blocks * runner.block_tokens)
        self._ended: list[StepOutput] = []  # ends that no step caused, sent with the next one

    @property
    def num_blocks(self) -> int:
        return self._settings.num_blocks

    @property
    def has_work(self) -> bool:
        """Whether a step now would do something. False too where all that waits is held back."""
        return self._scheduler.has_work or bool(self._ended) or self._is_due

    @property
    def next_deadline_s(self) -> float | None:
        """When a step is due though nothing else happens: the first end of a hold or of an answer's time."""
        ends = [supply.until_s for supply in self._held.values()]
        ends += [sequence.deadline_s for sequences in self._open.values() for sequence in sequences]
        return min((time for time in ends if time is not None), default=None)

    def load(self) -> Load:
        """How busy the engine is."""
        blocks = self._scheduler.blocks
        waiting = self._scheduler.waiting
        return Load(
            step=self.counters.steps,
            running=len(self._scheduler.running),
            waiting=len(waiting),
            waiting_tokens=sum(s.num_prompt_left for s in (*waiting, *self._scheduler.running)),
            free_blocks=blocks.num_free,
            cached_blocks=blocks.num_cached,
            used_blocks=blocks.num_used,
        )

    def add(self, generation: Generation, hold_s: float | None = None) -> Prefix:
        """Take a generation in. Raises BadRequest, ContextTooLong or Busy; then nothing is left of it.

        With `hold_s` it may get blocks from elsewhere: if some are missing that nobody else is about to
        bring, it waits for `supply` or `release_hold`, but no longer than that. Without, the prefix
        returned names no blocks: there is nobody to ask for them.

        One that is for its prompt's KV only ends when all blocks are computed that another engine could
        take over, the last of them always here.
        """
        self._check(generation)
        if generation.is_prefill_only:
            generation = prompt_blocks(generation, self.runner.block_tokens)
            if not generation.token_ids:  # not one full block: nothing to offer
                self._ended.append(StepOutput(generation.id, generation.choices[0], 0, [], Terminal.LENGTH))
                return Prefix(generation.id, (), 0, 0)
        now = self._clock.now()
        deadline = None if generation.timeout_s is None else now + generation.timeout_s
        supply = None if hold_s is None else Supply()
        chain = Chain.of(generation, self._settings.namespace, self.runner.block_tokens)
        sequences = [
            Sequence(
                key=next(self._keys),
                generation=generation,
                choice=choice,
                tokens=list(generation.token_ids),
                sampler=Sampler(generation.sampling, choice, self.runner.vocab_size),
                chain=chain,
                arrived_s=now,
                deadline_s=deadline,
                supply=supply,
            )
            for choice in generation.choices
        ]
        for sequence in sequences:
            for token_id in sequence.tokens[sequence.num_prompt_tokens :]:
                sequence.sampler.accept(token_id)
            self._scheduler.add(sequence)
            sequence.num_found = len(self._scheduler.hits(sequence)) * self.runner.block_tokens
        self._open[generation.id] = sequences
        if supply is None or hold_s is None:
            return Prefix(generation.id, (), 0, generation.num_prompt_tokens)
        if self._scheduler.hold(sequences[0]):
            supply.until_s = now + hold_s
            self._held[generation.id] = supply
        return self._prefix(sequences[0])

    def is_held(self, generation_id: str) -> bool:
        """Whether it waits for `supply`."""
        return generation_id in self._held

    def is_open(self, generation_id: str) -> bool:
        """Whether a choice of it has not ended."""
        return generation_id in self._open

    def supply(self, generation_id: str, arrivals: Iterable[Arrival], report: KvReport) -> None:
        """Blocks from elsewhere for a generation that waits, in the order of its chain; ends its hold.

        Too late (it runs, or has ended) is fine: nothing happens.
        """
        waiting = next((s for s in self._open.get(generation_id, ()) if s.cached is None), None)
        if waiting is None or waiting.supply is None or waiting.supply.is_counted:
            return
        started = self._clock.now()
        self._handover.take_in(waiting, waiting.supply, arrivals)
        waiting.supply.import_s += self._clock.now() - started
        self._end_hold(generation_id, report)

    def release_hold(self, generation_id: str) -> None:
        """Nothing will come for this generation."""
        self._end_hold(generation_id, KvReport(decision="fault"))

    def held_hashes(self) -> list[BlockHash]:
        """Hashes of all blocks that are here."""
        return self._scheduler.blocks.hashes()

    def take_hash_changes(self) -> HashChanges | None:
        """Which blocks came and went since the last call. None: too many, `held_hashes` is what is left."""
        return self._scheduler.blocks.take_changes()

    def forget(self, tenants: Collection[bytes]) -> None:
        """Drop the blocks of these tenants that are in no use; each by what its scopes begin with."""
        self._handover.forget(self._scheduler.blocks.forget(tenants))

    def exportable(self) -> list[KvBlock]:
        """Blocks that are worth copying out now and were not returned before."""
        return self._handover.take_due()

    def offer_anew(self, lost: Iterable[BlockHash]) -> None:
        """Whoever these were exported to lost them: `exportable` may return them once more, when in use."""
        self._handover.offer_anew(lost)

    def export(self, blocks: Items[KvBlock]) -> list[tuple[KvBlock, bytes]]:
        """The bytes of those blocks that are still here, in their order. Ask for all of a turn at once."""
        return self._handover.export(blocks)

    def abort(self, generation_id: str, choice: int | None = None) -> None:
        """End a generation, or one choice of it. Unknown or ended ids are fine."""
        for sequence in list(self._open.get(generation_id, [])):
            if choice is None or sequence.choice == choice:
                self._end(sequence, Terminal.ABORTED)

    def step(self) -> list[StepOutput]:
        """One forward pass. Returns what it brought, and the ends since the last one."""
        started = self._clock.now()
        self._end_overdue(started)
        plan = self._scheduler.schedule()
        for sequence in plan.opened:
            if sequence.queued_s is None:
                sequence.queued_s = started - sequence.arrived_s
        before = replace(self.counters)
        outputs = self._run(plan) if plan.slices or plan.preempted else []
        outputs, self._ended = self._ended + outputs, []
        if plan.slices:
            self.counters.steps += 1
            num_tokens = [s.num_tokens for s in plan.slices]
            seconds = self._clock.now() - started
            self.last_step = StepReport.between(before, self.counters, num_tokens, seconds)
        return outputs

    def end_all(self, finish: Terminal, error: str | None = None) -> list[StepOutput]:
        """End every generation, for a shutdown or a dead runner."""
        for sequences in list(self._open.values()):
            for sequence in list(sequences):
                self._end(sequence, finish, error)
        outputs, self._ended = self._ended, []
        return outputs

    def check(self) -> None:
        """Recount the blocks; when idle none may be in use. Raises AssertionError."""
        self._scheduler.blocks.check()
        self._handover.check()
        if not self._scheduler.running:
            assert self._scheduler.blocks.num_used == 0, "blocks in use without a running sequence"

    def _check(self, generation: Generation) -> None:
        check_borders(generation)
        num_tokens, context = len(generation.token_ids), self.runner.context_tokens
        if num_tokens >= context:
            raise ContextTooLong(
                f"The prompt has {num_tokens} tokens; the maximum context length is {context} tokens, "
                "answer included."
            )
        if not 0 <= min(generation.token_ids) <= max(generation.token_ids) < self.runner.vocab_size:
            raise BadRequest("A token id is outside the vocabulary.", param="prompt")
        if num_tokens // self.runner.block_tokens + 1 > self._settings.num_blocks:
            raise ContextTooLong("The prompt needs more KV blocks than this worker has.")
        if generation.constraint is not None or generation.lora is not None:
            raise BadRequest("This engine takes neither a constraint nor a LoRA adapter.")
        if generation.id in self._open:
            raise BadRequest(f"Generation {generation.id} is running already.")
        if self._scheduler.num_waiting + len(generation.choices) > self._settings.max_waiting:
            raise Busy("The worker's queue is full.")

    @property
    def _is_due(self) -> bool:
        """Whether a time in `next_deadline_s` has come."""
        due_s = self.next_deadline_s
        return due_s is not None and due_s <= self._clock.now()

    def _end_overdue(self, now: float) -> None:
        overdue = [
            sequence
            for sequences in self._open.values()
            for sequence in sequences
            if sequence.deadline_s is not None and sequence.deadline_s <= now
        ]
        for sequence in overdue:
            self._end(sequence, Terminal.DEADLINE)
        late = [i for i, supply in self._held.items() if supply.until_s is not None and supply.until_s <= now]
        for generation_id in late:
            self._end_hold(generation_id, KvReport(decision="late"))

    def _end_hold(self, generation_id: str, report: KvReport) -> None:
        self._held.pop(generation_id, None)
        for sequence in self._open.get(generation_id, ()):
            self._scheduler.let_go(sequence)
            if sequence.supply is not None:
                sequence.supply.until_s = None
                sequence.supply.report = report

    def _prefix(self, sequence: Sequence) -> Prefix:
        num_local = len(self._scheduler.hits(sequence))
        num_usable = sequence.num_usable_blocks if self.runner.shares_blocks else 0
        blocks = tuple(sequence.block_at(index) for index in range(num_usable))
        return Prefix(sequence.generation.id, blocks, num_local, sequence.num_prompt_tokens)

    def _run(self, plan: StepPlan) -> list[StepOutput]:
        for sequence in plan.preempted:
            self.runner.close(sequence.key)
        self.counters.preemptions += len(plan.preempted)
        self._handover.forget(plan.evicted)
        for sequence in plan.preempted:
            self._handover.offer(sequence)
        try:
            for sequence in plan.opened:
                self._begin(sequence)
                if sequence.generation.is_prefill_only:
                    self._handover.offer_again(sequence)
            logits = self.runner.run([self._chunk(s) for s in plan.slices])
        except RunnerFault as fault:
            self.counters.failed_steps += 1
            for part in plan.slices:
                self._end(part.sequence, Terminal.ERROR, str(fault))
            return []
        self.counters.prefill_tokens += plan.num_prefill_tokens
        return self._commit(plan.slices, logits)

    def _begin(self, sequence: Sequence) -> None:
        """Open it in the runner with the blocks that were found. Raises RunnerFault."""
        counters, started = self.counters, self._clock.now()
        num_hits = sequence.num_computed // self.runner.block_tokens
        copying_s = self.runner.open(sequence.key, sequence.block_table[:num_hits])
        counters.open_s += self._clock.now() - started
        counters.cached_tokens += min(sequence.num_computed, sequence.num_prompt_tokens)
        num_brought, sequence.num_brought = sequence.num_brought, 0
        if num_brought and sequence.supply is not None:
            counters.placed_blocks += num_brought
            counters.import_s += sequence.supply.import_s + copying_s * num_brought / num_hits

    def _chunk(self, part: Slice) -> Chunk:
        sequence = part.sequence
        start = sequence.num_computed
        end = start + part.num_tokens
        wants_logits = end == len(sequence.tokens) and not sequence.generation.is_prefill_only
        return Chunk(sequence.key, start, sequence.tokens[start:end], wants_logits)

    def _commit(self, slices: list[Slice], logits: Logits) -> list[StepOutput]:
        caught_up: list[Sequence] = []
        outputs: list[StepOutput] = []
        for part in slices:
            for index, block in self._scheduler.mark_computed(part.sequence, part.num_tokens):
                self.runner.keep(part.sequence.key, index, block)
            self._handover.note_kept(part.sequence)
            if part.sequence.num_to_compute > 0:
                continue
            if part.sequence.generation.is_prefill_only:
                outputs.append(self._output(part.sequence, 0, [], Terminal.LENGTH, None))
            else:
                caught_up.append(part.sequence)
        chosen = choose_batch(logits, [s.sampler for s in caught_up], [s.position for s in caught_up])
        for sequence, choice in zip(caught_up, chosen, strict=True):
            if isinstance(choice, BadLogits):
                self._end(sequence, Terminal.ERROR, f"The model gave no usable output: {choice}.")
            else:
                outputs.append(self._accept(sequence, choice))
        return outputs

    def _accept(self, sequence: Sequence, chosen: Chosen) -> StepOutput:
        sampling = sequence.generation.sampling
        position = sequence.position
        if chosen.id in sampling.stop_ids and position >= sampling.min_tokens:
            return self._output(sequence, position, [], Terminal.STOP, None)
        sequence.tokens.append(chosen.id)
        sequence.sampler.accept(chosen.id)
        is_full = position + 1 >= sampling.max_tokens or len(sequence.tokens) >= self._most_tokens
        self.counters.decode_tokens += 1
        return self._output(
            sequence, position, [chosen.id], Terminal.LENGTH if is_full else None, chosen.logprobs
        )

    def _output(
        self,
        sequence: Sequence,
        position: int,
        ids: list[int],
        finish: Terminal | None,
        logprobs: TokenLogprobs | None,
    ) -> StepOutput:
        is_first = not sequence.has_spoken
        sequence.has_spoken = True
        if finish is not None:
            self._forget(sequence)
        return StepOutput(
            sequence.generation.id,
            sequence.choice,
            position,
            ids,
            finish,
            None if logprobs is None else [logprobs],
            sequence.cached if is_first else None,
            queued_s=sequence.queued_s if is_first else None,
            kv=sequence.report if is_first else None,
        )

    def _end(self, sequence: Sequence, finish: Terminal, error: str | None = None) -> None:
        self._forget(sequence)
        self._ended.append(
            StepOutput(sequence.generation.id, sequence.choice, sequence.position, [], finish, error=error)
        )

    def _forget(self, sequence: Sequence) -> None:
        was_held = sequence.is_held
        if self._scheduler.remove(sequence):
            self.runner.close(sequence.key)
            self._handover.offer(sequence)
        generation_id = sequence.generation.id
        siblings = self._open[generation_id]
        siblings.remove(sequence)
        if not siblings:
            del self._open[generation_id]
            self._held.pop(generation_id, None)
        elif was_held:
            self._scheduler.hold(siblings[0])
