"""The memory store, on a clock of its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.clock import VirtualClock
from antiphon.kv.memorystore import MemoryStore
from antiphon.kv.store import FaultKind, StoreFault


def test_what_expires_soonest_makes_room() -> None:
    """As volatile-ttl does: a touched value stays, the one with the least time left goes."""
    store = MemoryStore(VirtualClock(), 100)
    store.put("a", bytes(40), 1000, 1.0)
    store.put("b", bytes(40), 2000, 1.0)
    store.touch([("a", 3000)], 1.0)
    store.put("c", bytes(40), 1000, 1.0)
    assert [store.get_run([key], 1.0).values[0] is None for key in "abc"] == [False, True, False]


def test_a_value_lives_exactly_its_time() -> None:
    """There up to its last moment, gone at its end."""
    clock = VirtualClock()
    store = MemoryStore(clock, 100)
    store.put("a", b"value", 1500, 1.0)
    clock.advance(1.499)
    assert store.get_run(["a"], 1.0).values == [b"value"]
    clock.advance(0.001)
    assert store.get_run(["a"], 1.0).values == [None]
    assert store.num_bytes == 0


def test_what_never_fits_is_refused() -> None:
    """A value larger than all of the room evicts nobody."""
    store = MemoryStore(VirtualClock(), 100)
    store.put("a", bytes(60), 1000, 1.0)
    with pytest.raises(StoreFault) as raised:
        store.put("b", bytes(101), 1000, 1.0)
    assert raised.value.kind is FaultKind.OUT_OF_MEMORY
    assert store.num_bytes == 60


@given(
    steps=st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(0, 50), st.integers(1, 5000), st.floats(0, 2)),
        max_size=40,
    )
)
def test_it_never_holds_more_than_its_room(steps: list[tuple[str, int, int, float]]) -> None:
    """After any puts and waits: the bytes are within bounds, and those of the values that can be had."""
    clock = VirtualClock()
    store = MemoryStore(clock, 100)
    for key, size, ttl_ms, wait_s in steps:
        store.put(key, bytes(size), ttl_ms, 1.0)
        clock.advance(wait_s)
        held = [store.get_run([name], 1.0).values[0] for name in "abcdef"]
        assert store.num_bytes == sum(len(value) for value in held if value is not None) <= 100
