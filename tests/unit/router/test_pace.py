"""Which replicas are far slower than their like."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from antiphon.router.pace import slow_ones


def test_ten_times_slower_than_the_others() -> None:
    """One of them is; without others, or where nobody knows its pace, nobody is."""
    assert slow_ones({"a": 0.02, "b": 0.03, "c": 0.31}) == {"c"}
    assert slow_ones({"a": 0.02, "b": 0.03, "c": 0.24}) == set()
    assert slow_ones({"c": 9.0}) == set()
    assert slow_ones({"a": 0.0, "c": 9.0}) == set()
    assert slow_ones({}) == set()


@given(st.dictionaries(st.text(max_size=2), st.floats(0.001, 10), max_size=8))
def test_never_most_of_them(step_s: dict[str, float]) -> None:
    """Far slower than the median of the others: at most half can be, and never the fastest."""
    found = slow_ones(step_s)
    assert 2 * len(found) <= len(step_s)
    assert not step_s or min(step_s, key=step_s.__getitem__) not in found
