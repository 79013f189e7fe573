"""tokens.budget: what things cost, and that the cost is known before they are done."""

from __future__ import annotations

import pytest

from antiphon.tokens.budget import Budget, OverBudget


def spent(value: object) -> int:
    budget = Budget(1000, 100_000)
    budget.weigh(value)
    return 100_000 - budget.num_characters


def test_steps_and_characters_run_out_separately() -> None:
    """The last step and the last character may be spent, the next may not."""
    steps = Budget(2, 100)
    steps.spend(1)
    steps.spend(1)
    with pytest.raises(OverBudget):
        steps.spend(1)
    characters = Budget(100, 5)
    characters.spend(5)
    with pytest.raises(OverBudget):
        characters.spend(1)


def test_elements_of_elements_are_weighed() -> None:
    """A list in a list weighs as often as it would print; a mapping weighs keys and values."""
    inner = ["abc"] * 10
    assert spent([inner, inner]) > 2 * spent(inner) > 60
    assert spent({"key": "x" * 50}) >= 53


def test_weighing_gives_up_on_exponential_values() -> None:
    """A value of 2^64 elements is not walked to its end."""
    value: list[object] = []
    for _ in range(64):
        value = [value, value]
    with pytest.raises(OverBudget):
        Budget(10_000, 1 << 20).weigh(value)


@pytest.mark.parametrize(
    ("left", "right", "cost"),
    [("abc", 7, 21), (7, "abc", 21), ([1], 5, 80), ("abc", -5, 0), ("abc", True, 3), (2**100, 2**100, 1)],
)
def test_a_product_costs_its_size(left: object, right: object, cost: int) -> None:
    """Texts and lists repeated cost what they will hold, numbers one."""
    budget = Budget(10, 1000)
    budget.spend_multiplying(left, right)
    assert 1000 - budget.num_characters == cost


def test_numbers_stay_small() -> None:
    """No product or power beyond 256 bits is computed."""
    with pytest.raises(OverBudget, match="256 bits"):
        Budget(10, 1000).spend_multiplying(2**200, 2**200)
    with pytest.raises(OverBudget, match="256 bits"):
        Budget(10, 1000).spend_raising(9, 9**9)
    Budget(10, 1000).spend_raising(2.5, 0.5)


@pytest.mark.parametrize(("text", "old", "new"), [("aaaa", "a", "bc"), ("abc", "", "--"), ("abc", "x", "yy")])
def test_replacing_costs_at_least_its_result(text: str, old: str, new: str) -> None:
    """What `replace` will make is counted beforehand, for an empty `old` too."""
    budget = Budget(10, 1000)
    budget.spend_replacing(text, old, new)
    assert 1000 - budget.num_characters >= len(text.replace(old, new))


def test_joining_costs_at_least_its_result() -> None:
    """What `join` will make is counted beforehand."""
    budget = Budget(10, 1000)
    budget.spend_joining("--", ["abc", "d"])
    assert 1000 - budget.num_characters >= len("abc--d")
