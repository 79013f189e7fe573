"""The dispatcher against whatever workers, clients and time may do, step by step.

Workers die, drain, fail, fall silent, come back, leave and join; clients start and leave; time passes. All
the while every choice is computed once (twice while hedged), what is received is what an undisturbed worker
says, and nothing is left of what has ended, here or at a worker.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from antiphon.core.errors import NoReplica
from antiphon.core.generation import Generation, Role, Sampling, Terminal
from antiphon.router.answer import Answer
from antiphon.router.budget import RESERVE, SHARE, TRICKLE_PER_S
from antiphon.router.mover import PARKED_S
from antiphon.router.watch import Patience
from support.fakefleet import FakeFleet, FakeWorker, token

PAID = {"error", "first_token", "token"}  # causes of moves
LONG, SHORT = 2000, 20
picks = st.integers(0, 10**6)


class DispatchMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Answer] = []
        self.num_started = 0

    @initialize(
        roles=st.sampled_from([[Role.BOTH] * 3, [Role.PREFILL, Role.DECODE, Role.DECODE]]),
        hedge_after_s=st.sampled_from([0.05, 0.3, 0.47, None]),
        overdue_s=st.sampled_from([0.8, 5.0]),
    )
    def begin(self, roles: list[Role], hedge_after_s: float | None, overdue_s: float) -> None:
        patience = Patience(first_token_s=overdue_s, token_s=overdue_s, hedge_after_s=hedge_after_s)
        self.fleet = FakeFleet(roles, patience)
        self.made = self.fleet.dispatcher
        self.begun_s = self.fleet.clock.now()
        self.start_one(2, 4, is_long=True)

    def teardown(self) -> None:
        if not hasattr(self, "fleet"):
            return
        try:
            self.end_well()
        finally:
            self.fleet.loop.close()

    # What clients do.

    @rule(number=st.integers(1, 3), n=st.integers(1, 3), num_tokens=st.integers(1, 6), is_long=st.booleans())
    def start_some(self, number: int, n: int, num_tokens: int, is_long: bool) -> None:
        for _ in range(number):
            self.start_one(n, num_tokens, is_long=is_long)

    def start_one(self, n: int, num_tokens: int, *, is_long: bool) -> None:
        self.num_started += 1
        length = LONG if is_long else SHORT
        generation = Generation(
            id=f"g{self.num_started}",
            model="scripted",
            sampling=Sampling(seed=1, max_tokens=num_tokens),
            token_ids=[self.num_started] * length,
            num_prompt_tokens=length,
            n=n,
        )
        try:
            self.answers.append(self.fleet.within(lambda: self.made.start(generation)))
        except NoReplica:
            assert not any(worker.link.takes_work for worker in self.fleet.workers)

    @precondition(lambda self: self.answers)
    @rule(pick=picks, choice=st.none() | st.integers(0, 2))
    def leave(self, pick: int, choice: int | None) -> None:
        """A client leaves, or a stop string was found in one of its choices."""
        answer = self.answers[pick % len(self.answers)]
        if choice is None or choice < answer.generation.n:
            self.fleet.within(lambda: answer.abort(choice))

    # What workers do.

    @rule(pick=picks, which=picks, num_tokens=st.integers(1, 3), reads=st.booleans())
    def speak(self, pick: int, which: int, num_tokens: int, reads: bool) -> None:
        """Of one of its generations; it may not have heard yet that this was ended."""
        worker = self.speaker(pick, reads=reads)
        if worker is not None and worker.tasks:
            self.fleet.say(worker, worker.step(self.task(worker, which), num_tokens))

    @rule(pick=picks, num_tokens=st.integers(1, 8))
    def step(self, pick: int, num_tokens: int) -> None:
        """Of all of them, in one frame."""
        worker = self.speaker(pick)
        if worker is not None:
            names = list(worker.tasks)
            self.fleet.say(worker, [out for name in names for out in worker.step(name, num_tokens)])

    @rule(pick=picks, which=picks, num_tokens=st.integers(0, 2))
    def stop(self, pick: int, which: int, num_tokens: int) -> None:
        """A model ends an answer before its most tokens."""
        worker = self.speaker(pick)
        if worker is not None and worker.tasks:
            self.fleet.say(worker, worker.step(self.task(worker, which), num_tokens, Terminal.STOP))

    @rule(
        pick=picks,
        which=picks,
        word=st.sampled_from(
            [
                (Terminal.ERROR, "The step failed."),
                (Terminal.REFUSED, "no_replica: The worker is about to stop."),
                (Terminal.REFUSED, "context_length_exceeded: Too long."),
            ]
        ),
    )
    def fail(self, pick: int, which: int, word: tuple[Terminal, str]) -> None:
        """It will not finish one of its generations."""
        worker = self.speaker(pick)
        if worker is not None and worker.tasks:
            self.fleet.say(worker, worker.give_up(self.task(worker, which), *word))

    @rule(pick=picks, gives_back=st.booleans())
    def drain(self, pick: int, gives_back: bool) -> None:
        """It takes nothing new; when its time is up it gives back what is left."""
        worker = self.speaker(pick)
        if worker is not None:
            worker.drain()
            self.fleet.say(worker, worker.give_all_back() if gives_back else ())

    @rule(pick=picks)
    def die(self, pick: int) -> None:
        worker = self.worker(pick)
        if worker.link.is_up:
            self.fleet.go_down(worker)

    @rule(pick=picks)
    def come_back(self, pick: int) -> None:
        """It starts again, or speaks again."""
        idle = [worker for worker in self.fleet.workers if worker.is_silent or not worker.link.is_up]
        worker = self.worker(pick, idle)
        if not worker.link.is_up and worker.link in self.made.fleet.links:
            self.fleet.come_up(worker)
        worker.is_silent = False

    @rule(pick=picks, seconds=st.sampled_from([0.0, 0.6]))
    def fall_silent(self, pick: int, seconds: float) -> None:
        self.worker(pick).is_silent = True
        self.fleet.advance(seconds)

    @rule(pick=picks)
    def take_off(self, pick: int) -> None:
        self.fleet.take_off(self.worker(pick))

    @rule(pick=picks)
    def put_back(self, pick: int) -> None:
        self.fleet.put_back(self.worker(pick))

    @rule(seconds=st.sampled_from([0.1, 0.3, 0.6, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.fleet.advance(seconds)

    # What holds.

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "fleet"):
            for answer in self.answers:
                self.is_said_once(answer)
                self.is_computed_once(answer)
            self.leaves_nothing()
            self.keeps_to_the_budget()

    def is_said_once(self, answer: Answer) -> None:
        """Each token and each end comes once, and is the right one."""
        said: dict[int, list[int]] = {choice: [] for choice in range(answer.generation.n)}
        ends: Counter[int] = Counter()
        for output in answer.events.since(0):
            assert not ends[output.choice], "something came after the end"
            assert output.position == len(said[output.choice])
            said[output.choice] += output.ids
            ends[output.choice] += output.finish is not None
        for choice, ids in said.items():
            assert ids == answer.received[choice].tolist() == [token(choice, n) for n in range(len(ids))]
            assert answer.is_open(choice) == (not ends[choice])

    def is_computed_once(self, answer: Answer) -> None:
        """An open choice is at one worker, or two rivals', or parked, or waits for its prompt."""
        num_parked = Counter(self.parked_choices(answer))
        waits = answer in [errand.answer for errand in self.made._splitter._errands]
        for choice in range(answer.generation.n):
            if not answer.is_open(choice):
                continue
            there = [attempt for attempt in answer.attempts if attempt.has(choice)]
            assert len(there) + num_parked[choice] + waits == 1 or (
                len(there) == 2 and there[0].rival is there[1] and not waits and not num_parked[choice]
            )
        assert len(answer.attempts) <= 2 * answer.generation.n + 2

    def leaves_nothing(self) -> None:
        """Links hold what answers hold; a worker that has read all it was sent holds what its link does."""
        assert not any(errand.answer.is_finished for errand in self.made._splitter._errands)
        prompts = [errand.prompt for errand in self.made._splitter._errands]
        owned = {a for answer in [*self.answers, *prompts] for a in answer.attempts if a.open_choices}
        held = [attempt for worker in self.fleet.workers for attempt in worker.link.attempts]
        assert len(held) == len(set(held))
        assert set(held) == owned
        for worker in self.fleet.workers:
            if worker.link.is_up:
                there = {attempt.generation.id: set(attempt.open_choices) for attempt in worker.link.attempts}
                assert worker.after_reading() == there
            else:
                assert not worker.link.num_open_answers
        for parked in self.made._mover._parked:
            assert self.fleet.clock.now() - parked.since_s <= PARKED_S + 0.2

    def keeps_to_the_budget(self) -> None:
        """What a failing fleet could multiply is a small part of what clients asked for."""
        num_paid = len(self.fleet.lines.named("answer.hedged"))
        num_paid += sum(line["reason"] in PAID for line in self.fleet.lines.named("answer.moved"))
        elapsed_s = self.fleet.clock.now() - self.begun_s
        assert num_paid <= RESERVE + SHARE * self.num_started + TRICKLE_PER_S * elapsed_s + 1e-6

    def end_well(self) -> None:
        """All workers come back and do their work: every answer ends, and nothing is left anywhere."""
        for worker in self.fleet.workers:
            self.fleet.put_back(worker)
            if not worker.link.is_up:
                self.fleet.come_up(worker)
            worker.is_silent = False
        for _ in range(400):
            if all(answer.is_finished for answer in self.answers):
                break
            for worker in self.fleet.workers:
                if not worker.link.is_up:
                    self.fleet.come_up(worker)
                worker.read()
                names = list(worker.tasks)
                self.fleet.say(worker, [out for name in names for out in worker.step(name, 8)])
            self.fleet.advance(0.1)
        assert all(answer.is_finished for answer in self.answers)
        self.fleet.advance(0.1)
        self.is_sound()
        assert self.made.num_parked == self.made.num_split == 0
        assert not any(
            worker.link.num_open_answers or worker.after_reading() for worker in self.fleet.workers
        )

    def worker(self, pick: int, some: list[FakeWorker] | None = None) -> FakeWorker:
        """One of these, else one that has something to do; any where there is none."""
        some = some or [worker for worker in self.fleet.workers if worker.link.num_open_answers]
        some = some or self.fleet.workers
        return some[pick % len(some)]

    def speaker(self, pick: int, *, reads: bool = True) -> FakeWorker | None:
        """One that can say something, having read what it was sent or not."""
        worker = self.worker(pick)
        if not worker.link.is_up or worker.is_silent:
            return None
        if reads:
            worker.read()
        return worker

    def task(self, worker: FakeWorker, which: int) -> str:
        return list(worker.tasks)[which % len(worker.tasks)]

    def parked_choices(self, answer: Answer) -> list[int]:
        mine = [parked for parked in self.made._mover._parked if parked.answer is answer]
        return [choice for parked in mine for choice in parked.choices if answer.is_open(choice)]


DispatchMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestDispatchMachine = DispatchMachine.TestCase
