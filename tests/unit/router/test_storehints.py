"""Hints about the store: bounded, ageing, made young by use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from antiphon.router.storehints import StoreHints


def test_what_was_told_is_found_until_it_is_seen_to_be_missing() -> None:
    """A run ends at the first key that is not there."""
    hints = StoreHints(100, 10.0)
    hints.add([1, 2, 3, 5], 0.0)
    assert hints.run([1, 2, 3, 4, 5], 0, 0.0) == 3
    assert hints.run([1, 2, 3, 4, 5], 4, 0.0) == 5
    assert hints.run([1, 2, 3, 4, 5], 3, 0.0) == 3
    hints.discard([2, 9])
    assert hints.run([1, 2, 3], 0, 0.0) == 1


@given(young=st.sets(st.integers(0, 30)), old=st.sets(st.integers(0, 30)), start=st.integers(0, 31))
def test_a_run_goes_on_over_young_and_old_keys(young: set[int], old: set[int], start: int) -> None:
    """In any order, to the first that is neither; those it went over are young again."""
    hints = StoreHints(200, 10.0)
    hints.add(sorted(old), 0.0)
    hints.age(10.0)
    hints.add(sorted(young), 10.0)
    keys = list(range(31))
    end = next((key for key in keys[start:] if key not in young | old), len(keys)) if start < 31 else start
    assert hints.run(keys, start, 10.0) == end
    hints.age(20.0)
    assert all(key in hints for key in keys[start:end])
    assert not any(key in hints for key in old - young - set(keys[start:end]))


def test_keys_that_nobody_speaks_of_are_forgotten() -> None:
    """After `keep_s` at the earliest, after twice that at the latest."""
    hints = StoreHints(100, 10.0)
    hints.add([1], 0.0)
    hints.add([2], 9.0)
    hints.age(10.5)
    assert 1 in hints and 2 in hints
    hints.add([3], 12.0)
    hints.age(20.5)
    assert 1 not in hints and 3 in hints


def test_a_use_keeps_a_key() -> None:
    """What prompts ask for stays, what they do not goes."""
    hints = StoreHints(100, 10.0)
    hints.add([1, 2], 0.0)
    for now in range(5, 60, 5):
        hints.age(float(now))
        assert hints.run([1], 0, float(now)) == 1
    assert 2 not in hints


def test_a_long_silence_forgets_all() -> None:
    """However long it was, and it begins anew after it."""
    hints = StoreHints(100, 10.0)
    hints.add([1], 0.0)
    hints.age(1e9)
    assert len(hints) == 0
    hints.add([2], 1e9)
    hints.age(1e9 + 9)
    assert 2 in hints


@given(most=st.integers(2, 20), told=st.lists(st.lists(st.integers(0, 60), max_size=40), max_size=12))
def test_there_are_never_more_than_the_bound_and_the_last_told_are_among_them(
    most: int, told: list[list[int]]
) -> None:
    """Whatever is told at once."""
    hints = StoreHints(most, 10.0)
    for keys in told:
        hints.add(keys, 0.0)
        assert len(hints) <= most
        assert all(key in hints for key in keys[-(most // 2) :][-1:])
