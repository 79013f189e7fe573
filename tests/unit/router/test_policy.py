"""The choice between replicas."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from antiphon.router.policy import ReplicaLoad, choose

loads = st.builds(
    ReplicaLoad,
    running=st.integers(0, 9),
    waiting=st.integers(0, 9),
    dispatched=st.integers(0, 9),
    own=st.integers(0, 9),
)


def test_nobody_serves() -> None:
    """Without replicas there is no choice."""
    assert choose([], 0.5) is None


def test_work_sent_since_the_report_counts() -> None:
    """A replica that looks idle but was just given work is not taken again."""
    assert choose([ReplicaLoad(0, 0, 2, 2), ReplicaLoad(1, 0, 0, 0)], 0.0) == 1


def test_a_report_that_is_too_early_does_not_hide_own_work() -> None:
    """Open answers of this gateway count even where the worker's report misses them."""
    assert choose([ReplicaLoad(0, 0, 0, 5), ReplicaLoad(2, 1, 0, 0)], 0.0) == 1


def test_ties_are_settled_by_the_draw() -> None:
    """Over the range of draws every one of equal replicas is taken."""
    equal = [ReplicaLoad(1, 0, 0, 0)] * 3
    assert [choose(equal, draw) for draw in (0.0, 0.5, 0.99)] == [0, 1, 2]


@given(st.lists(loads, min_size=1), st.floats(0, 1, exclude_max=True))
def test_the_choice_is_always_a_least_loaded_one(replicas: list[ReplicaLoad], draw: float) -> None:
    """Whatever the figures and the draw."""
    index = choose(replicas, draw)
    assert index is not None
    assert replicas[index].sequences == min(replica.sequences for replica in replicas)
