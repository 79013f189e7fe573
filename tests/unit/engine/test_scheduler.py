"""Scheduler: order of service, chunks, admission, preemption, waiting for another's blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from antiphon.core.generation import CachedTokens
from antiphon.engine.blocks import BlockManager
from antiphon.engine.sampling import Sampler
from antiphon.engine.scheduler import Scheduler, StepPlan
from antiphon.engine.sequence import Chain, Sequence

BLOCK = 4


class Bench:
    """A scheduler, and sequences made with few words."""

    def __init__(
        self, make_generation: Callable[..., object], num_blocks: int = 100, budget: int = 16
    ) -> None:
        self.make_generation = make_generation
        self.scheduler = Scheduler(
            BlockManager(num_blocks), block_tokens=BLOCK, token_budget=budget, max_running=8
        )
        self.num_made = 0

    def add(self, tokens: list[int], **options: object) -> Sequence:
        generation = self.make_generation(f"g{self.num_made}", tokens, **options)
        sequence = Sequence(
            key=self.num_made,
            generation=generation,
            choice=0,
            tokens=list(tokens),
            sampler=Sampler(generation.sampling, 0, 999),
            chain=Chain.of(generation, b"", BLOCK),
            arrived_s=0.0,
            deadline_s=None,
        )
        self.num_made += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        """Schedule and commit: each sequence that caught up gets one more token."""
        plan = self.scheduler.schedule()
        for part in plan.slices:
            self.scheduler.mark_computed(part.sequence, part.num_tokens)
            if part.sequence.num_to_compute == 0:
                part.sequence.tokens.append(7)
        return plan

    @staticmethod
    def shares(plan: StepPlan) -> dict[int, int]:
        return {part.sequence.key: part.num_tokens for part in plan.slices}


@pytest.fixture
def bench(make_generation: Callable[..., object]) -> Bench:
    return Bench(make_generation)


def unlike(number: int, length: int) -> list[int]:
    """Tokens that share no block with those of another number."""
    return [number * 100 + i for i in range(length)]


def test_long_prompts_are_computed_in_chunks(bench: Bench) -> None:
    """No step computes more than the budget; the prompt is done when its chunks are."""
    bench.add(unlike(1, 40))
    assert [bench.shares(bench.step())[0] for _ in range(3)] == [16, 16, 8]


def test_decodes_come_before_prefills(bench: Bench) -> None:
    """A running answer gets its token in every step while a long prompt catches up."""
    bench.add(unlike(1, 4))
    bench.step()
    bench.add(unlike(2, 64))
    for _ in range(3):
        assert bench.shares(bench.step()) == {0: 1, 1: 15}


def test_arrival_order_within_a_class_and_classes_by_urgency(bench: Bench) -> None:
    """Class first, then first come, first served."""
    bench.add(unlike(1, 12), priority=2)
    bench.add(unlike(2, 12), priority=1)
    bench.add(unlike(3, 12), priority=1)
    assert bench.shares(bench.step()) == {1: 12, 2: 4}


def test_identical_prompts_are_computed_once(bench: Bench) -> None:
    """The follower waits until the leader's blocks are there, then computes only the last token."""
    bench.add(unlike(1, 33))
    bench.add(unlike(1, 33))
    assert bench.shares(bench.step()) == {0: 16}
    assert bench.shares(bench.step()) == {0: 16}
    assert bench.shares(bench.step()) == {0: 1, 1: 1}


def test_a_follower_does_not_hold_up_the_next_one(bench: Bench) -> None:
    """Who waits for another's block is overtaken by those who need not."""
    bench.add(unlike(1, 16))
    bench.add(unlike(1, 16))
    bench.add(unlike(2, 8))
    bench.step()
    assert 2 in bench.shares(bench.step())


def test_followers_go_on_when_the_leader_is_removed(bench: Bench) -> None:
    """An aborted leader leaves nobody waiting for blocks that will never come."""
    leader = bench.add(unlike(1, 33))
    bench.add(unlike(1, 33))
    bench.step()
    bench.scheduler.remove(leader)
    plan = bench.step()
    assert bench.shares(plan) == {1: 16}
    assert plan.opened[0].cached == CachedTokens(engine=16), "what the leader computed is still used"


def test_the_last_token_is_always_computed(bench: Bench) -> None:
    """Even when every block of a prompt is cached: its logits are needed."""
    first = bench.add(unlike(1, 16))
    bench.step()
    bench.scheduler.remove(first)
    bench.add(unlike(1, 16))
    assert bench.shares(bench.step()) == {1: 4}


def test_admission_waits_for_blocks_and_is_not_overtaken(make_generation: Callable[..., object]) -> None:
    """A big prompt without room is not passed by small ones for ever."""
    bench = Bench(make_generation, num_blocks=10)
    running = bench.add(unlike(1, 12))
    bench.step()
    bench.add(unlike(2, 30))
    bench.add(unlike(3, 4))
    assert set(bench.shares(bench.step())) == {0}
    bench.scheduler.remove(running)
    assert 1 in bench.shares(bench.step())


def test_the_latest_is_preempted_and_comes_back_first(make_generation: Callable[..., object]) -> None:
    """When blocks run out the last admitted gives way, and its computed blocks are found again."""
    bench = Bench(make_generation, num_blocks=6)
    bench.add(unlike(1, 8))
    late = bench.add(unlike(2, 7))
    plans = [bench.step()]
    while not plans[-1].preempted:
        plans.append(bench.step())
    assert plans[-1].preempted == [late]
    assert late.num_computed == 0
    assert bench.scheduler.waiting == [late]
    assert [p.sequence.key for p in plans[-1].slices] == [0]
    first = bench.scheduler.running[0]
    bench.scheduler.remove(first)
    plan = bench.step()
    assert plan.opened == [late]
    assert late.num_kept >= 1, "its first blocks were still cached"


def test_removing_a_waiting_sequence_says_that_it_was_not_open(bench: Bench) -> None:
    """The engine closes at the runner only what was opened there."""
    sequence = bench.add(unlike(1, 4))
    assert bench.scheduler.remove(sequence) is False
    assert not bench.scheduler.has_work


def test_a_budget_below_the_batch_is_refused() -> None:
    """Every running sequence must be able to get its one token."""
    with pytest.raises(ValueError, match="budget"):
        Scheduler(BlockManager(4), block_tokens=4, token_budget=2, max_running=4)


def test_without_sharing_no_block_is_found(make_generation: Callable[..., object]) -> None:
    """A runner that cannot copy blocks gets every prompt in full."""
    bench = Bench(make_generation)
    bench.scheduler = Scheduler(
        BlockManager(50), block_tokens=BLOCK, token_budget=16, max_running=8, share=False
    )
    bench.add(unlike(1, 8))
    bench.add(unlike(1, 8))
    assert bench.shares(bench.step()) == {0: 8, 1: 8}


def test_a_held_sequence_is_passed_and_keeps_its_place(bench: Bench) -> None:
    """Those behind it run meanwhile; let go it is first of those that wait."""
    held = bench.add(unlike(1, 12))
    assert bench.scheduler.hold(held)
    bench.add(unlike(2, 12))
    assert bench.shares(bench.step()) == {1: 12}
    bench.scheduler.let_go(held)
    bench.add(unlike(3, 12))
    assert bench.shares(bench.step()) == {1: 1, 0: 12, 2: 3}


def test_who_needs_the_block_a_held_one_waits_for_waits_too(bench: Bench) -> None:
    """What is about to come is not computed; with the hold the waiting ends."""
    held = bench.add(unlike(1, 12))
    bench.scheduler.hold(held)
    bench.add(unlike(1, 12))
    assert not bench.scheduler.has_work
    assert bench.shares(bench.step()) == {}
    bench.scheduler.let_go(held)
    assert bench.shares(bench.step()) == {0: 12}
    assert bench.shares(bench.step()) == {0: 1, 1: 4}


def test_there_is_nothing_to_hold_for_where_all_is_here_or_on_its_way(bench: Bench) -> None:
    """A follower needs no fetch of its own, nor does a prompt whose blocks are cached or too short."""
    first = bench.add(unlike(1, 13))
    assert bench.scheduler.hold(first)
    assert not bench.scheduler.hold(bench.add(unlike(1, 13)))
    longer = bench.add([*unlike(1, 16), 7])
    assert bench.scheduler.hold(longer), "its last block nobody brings"
    bench.scheduler.let_go(first)
    bench.scheduler.let_go(longer)
    bench.step()
    assert not bench.scheduler.hold(bench.add(unlike(1, 13)))
    assert not bench.scheduler.hold(bench.add(unlike(4, 4)))


def test_followers_go_on_when_a_held_leader_is_removed(bench: Bench) -> None:
    """What it was to bring will not come."""
    held = bench.add(unlike(1, 12))
    bench.scheduler.hold(held)
    bench.add(unlike(1, 12))
    assert bench.scheduler.remove(held) is False
    assert bench.scheduler.has_work
    assert bench.shares(bench.step()) == {1: 12}


def test_the_blocks_a_held_one_has_are_evicted_last(make_generation: Callable[..., object]) -> None:
    """What comes for it would be worthless without them."""
    bench = Bench(make_generation, num_blocks=6)
    for number in (1, 2):
        sequence = bench.add(unlike(number, 8))
        bench.step()
        bench.scheduler.remove(sequence)
    held = bench.add(unlike(1, 13))
    bench.scheduler.hold(held)
    bench.add(unlike(3, 13))
    bench.step()
    assert len(bench.scheduler.hits(held)) == 2


def test_without_sharing_nothing_is_held(make_generation: Callable[..., object]) -> None:
    """A runner that cannot take blocks over has nothing to wait for."""
    bench = Bench(make_generation)
    bench.scheduler = Scheduler(
        BlockManager(50), block_tokens=BLOCK, token_budget=16, max_running=8, share=False
    )
    assert not bench.scheduler.hold(bench.add(unlike(1, 12)))
