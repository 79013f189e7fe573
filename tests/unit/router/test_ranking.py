"""Ranking: the least of numbers that change."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from antiphon.router.ranking import Ranking

NAMES = st.sampled_from("abcdef")


def test_among_equals_the_first_is_the_least() -> None:
    """Who got the number first comes first; nobody where there is nobody."""
    ranking = Ranking()
    assert ranking.least() is None
    ranking.put("b", 1.0)
    ranking.put("a", 1.0)
    assert ranking.least() == "b"


@given(st.lists(st.tuples(NAMES, st.none() | st.integers(0, 5)), max_size=200))
def test_it_agrees_with_looking_at_all_of_them(changes: list[tuple[str, int | None]]) -> None:
    """After any changes the least is what a search finds, and the heap stays small."""
    ranking = Ranking()
    values: dict[str, int] = {}
    for name, value in changes:
        if value is None:
            ranking.drop(name)
            values.pop(name, None)
        else:
            ranking.put(name, value)
            values[name] = value
        least = ranking.least()
        assert (least is None) == (not values)
        assert least is None or values[least] == min(values.values())
        assert len(ranking) == len(values)


def test_numbers_that_change_often_do_not_pile_up() -> None:
    """Ten thousand changes leave a heap about as large as what counts."""
    ranking = Ranking()
    for number in range(10_000):
        ranking.put(f"n{number % 10}", number)
    assert len(ranking._heap) < 200
    assert ranking.least() == "n0"
