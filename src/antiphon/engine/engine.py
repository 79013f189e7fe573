"""The engine: generations in, step outputs out. `step` is schedule → run → commit.

Owns the sequences of one model on one runner. Pure and synchronous: no thread, no network, no wall
clock; whoever holds it calls from one thread. Every choice that was added ends in exactly one
output with `finish` set, whatever happens: answer complete, abort, deadline, failed step.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from antiphon.core.clock import Clock
from antiphon.core.errors import BadRequest, Busy, ContextTooLong
from antiphon.core.generation import Generation, Load, StepOutput, Terminal, TokenLogprobs
from antiphon.engine.blocks import BlockManager
from antiphon.engine.runner import Chunk, Logits, ModelRunner, RunnerFault
from antiphon.engine.sampling import BadLogits, Chosen, Sampler, choose_batch
from antiphon.engine.scheduler import Scheduler, Slice, StepPlan
from antiphon.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How much the engine holds and how much a step may do."""

    num_blocks: int
    token_budget: int = 256  # most tokens a step computes: bounds how long a decode waits for a prefill
    max_waiting: int = 1024  # sequences


@dataclass(slots=True)
class Counters:
    """What happened since the start; only grows."""

    steps: int = 0
    prefill_tokens: int = 0  # prompt tokens computed
    decode_tokens: int = 0  # answer tokens chosen
    cached_tokens: int = 0  # prompt tokens found computed
    preemptions: int = 0
    evicted_blocks: int = 0
    failed_steps: int = 0


@dataclass(frozen=True, slots=True)
class StepReport:
    """The shape of the last step, for metrics."""

    num_sequences: int = 0
    num_tokens: int = 0
    seconds: float = 0.0


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
        self._keys = itertools.count()
        self._open: dict[str, list[Sequence]] = {}  # unfinished choices by generation id
        self._ended: list[StepOutput] = []  # ends that no step caused, sent with the next one

    @property
    def num_blocks(self) -> int:
        return self._settings.num_blocks

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._ended)

    def load(self) -> Load:
        """How busy the engine is."""
        blocks = self._scheduler.blocks
        waiting = self._scheduler.waiting
        return Load(
            step=self.counters.steps,
            running=len(self._scheduler.running),
            waiting=len(waiting),
            waiting_tokens=sum(s.num_to_compute for s in waiting),
            free_blocks=blocks.num_free,
            cached_blocks=blocks.num_cached,
            used_blocks=blocks.num_used,
        )

    def add(self, generation: Generation) -> None:
        """Take a generation in. Raises BadRequest, ContextTooLong or Busy; then nothing is left of it."""
        self._check(generation)
        now = self._clock.now()
        deadline = None if generation.timeout_s is None else now + generation.timeout_s
        sequences = [
            Sequence(
                key=next(self._keys),
                generation=generation,
                choice=choice,
                tokens=list(generation.token_ids),
                sampler=Sampler(generation.sampling, choice, self.runner.vocab_size),
                arrived_s=now,
                deadline_s=deadline,
            )
            for choice in range(generation.n)
        ]
        for sequence in sequences:
            for token_id in sequence.tokens[sequence.num_prompt_tokens :]:
                sequence.sampler.accept(token_id)
            self._scheduler.add(sequence)
        self._open[generation.id] = sequences

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
        outputs = self._run(plan) if plan.slices or plan.preempted else []
        if self._ended:
            outputs = self._ended + outputs
            self._ended = []
        if plan.slices:
            self.counters.steps += 1
            num_tokens = sum(s.num_tokens for s in plan.slices)
            self.last_step = StepReport(len(plan.slices), num_tokens, self._clock.now() - started)
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
        if not self._scheduler.running:
            assert self._scheduler.blocks.num_used == 0, "blocks in use without a running sequence"

    def _check(self, generation: Generation) -> None:
        num_tokens, context = len(generation.token_ids), self.runner.context_tokens
        if num_tokens == 0:
            raise BadRequest("The prompt has no tokens.", param="messages")
        if not 0 < generation.num_prompt_tokens <= num_tokens:
            raise BadRequest("num_prompt_tokens is outside the token ids.")
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
        if self._scheduler.num_waiting + generation.n > self._settings.max_waiting:
            raise Busy("The worker's queue is full.")

    def _end_overdue(self, now: float) -> None:
        overdue = [
            sequence
            for sequences in self._open.values()
            for sequence in sequences
            if sequence.deadline_s is not None and sequence.deadline_s <= now
        ]
        for sequence in overdue:
            self._end(sequence, Terminal.DEADLINE)

    def _run(self, plan: StepPlan) -> list[StepOutput]:
        for sequence in plan.preempted:
            self.runner.close(sequence.key)
        self.counters.preemptions += len(plan.preempted)
        for block in plan.evicted:
            self.runner.drop(block)
        self.counters.evicted_blocks += len(plan.evicted)
        try:
            for sequence in plan.opened:
                num_hits = sequence.num_computed // self.runner.block_tokens
                self.runner.open(sequence.key, sequence.block_table[:num_hits])
                self.counters.cached_tokens += min(sequence.num_computed, sequence.num_prompt_tokens)
            logits = self.runner.run([self._chunk(s) for s in plan.slices])
        except RunnerFault as fault:
            self.counters.failed_steps += 1
            for part in plan.slices:
                self._end(part.sequence, Terminal.ERROR, str(fault))
            return []
        self.counters.prefill_tokens += plan.num_prefill_tokens
        return self._commit(plan.slices, logits)

    def _chunk(self, part: Slice) -> Chunk:
        sequence = part.sequence
        start = sequence.num_computed
        end = start + part.num_tokens
        return Chunk(sequence.key, start, sequence.tokens[start:end], end == len(sequence.tokens))

    def _commit(self, slices: list[Slice], logits: Logits) -> list[StepOutput]:
        caught_up: list[Sequence] = []
        for part in slices:
            for index, block in self._scheduler.mark_computed(part.sequence, part.num_tokens):
                self.runner.keep(part.sequence.key, index, block)
            if part.sequence.num_to_compute == 0:
                caught_up.append(part.sequence)
        chosen = choose_batch(logits, [s.sampler for s in caught_up], [s.position for s in caught_up])
        outputs: list[StepOutput] = []
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
        is_full = position + 1 >= sampling.max_tokens or len(sequence.tokens) >= self.runner.context_tokens
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
        )

    def _end(self, sequence: Sequence, finish: Terminal, error: str | None = None) -> None:
        self._forget(sequence)
        self._ended.append(
            StepOutput(sequence.generation.id, sequence.choice, sequence.position, [], finish, error=error)
        )

    def _forget(self, sequence: Sequence) -> None:
        if self._scheduler.remove(sequence):
            self.runner.close(sequence.key)
        siblings = self._open[sequence.generation.id]
        siblings.remove(sequence)
        if not siblings:
            del self._open[sequence.generation.id]
