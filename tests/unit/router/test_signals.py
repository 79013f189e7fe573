"""What autoscalers are told of the workers that a gateway sees."""

from __future__ import annotations

import pytest

from antiphon.core.generation import WorkerRates
from antiphon.router.policy import ReplicaState
from antiphon.router.signals import Signals, signals_of

RATES = WorkerRates(prefill_tokens_per_s=500.0, step_s=0.02)


def worker(replica: int, **state: object) -> ReplicaState:
    return ReplicaState(replica, **({"rates": RATES, "max_sequences": 8, "num_blocks": 100} | state))


def test_loads_add_up_and_the_wait_is_the_shortest() -> None:
    """What was sent since the report counts as work."""
    found = signals_of(
        [
            worker(0, running=3, waiting_tokens=1000, dispatched_tokens=500, free_blocks=40),
            worker(1, running=1, waiting_tokens=250, free_blocks=100),
        ]
    )
    assert found == Signals(2, queue_tokens=1750, running=4, kv_pressure=0.3, wait_s=0.5)


def test_full_batches_make_a_wait_without_a_queue() -> None:
    """A request that came now would wait for a slot."""
    assert signals_of([worker(0, running=8, free_blocks=100)]).wait_s == pytest.approx(256 * 2 * 0.02 / 8)


def test_a_worker_that_says_nothing_of_itself_does_not_break_the_sum() -> None:
    """No blocks, no rates: what is known counts."""
    found = signals_of([ReplicaState(0, running=2, waiting_tokens=100)])
    assert (found.running, found.kv_pressure) == (2, 0.0)
    assert found.wait_s > 0
