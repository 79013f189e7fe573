"""Prices and what tokens cost."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.catalogue import Catalogue
from antiphon.core.errors import BadRequest
from antiphon.core.price import PriceEntry

CATALOGUE = """
[[model]]
name = "m"
engine = "scripted"
[model.price]
input = {input}
cached_input = 0.015
output = 0.6
currency = "{currency}"
"""


def price(given: str, out: str, cached: str | None = None) -> PriceEntry:
    return PriceEntry(
        input=Decimal(given),
        output=Decimal(out),
        cached_input=None if cached is None else Decimal(cached),
        currency="EUR",
    )


def test_a_price_in_the_catalogue_is_exact() -> None:
    """What stands there as a decimal fraction is that fraction, not the float next to it."""
    (entry,) = Catalogue.parse(CATALOGUE.format(input="0.15", currency="USD")).entries()
    assert entry.price == PriceEntry(
        input=Decimal("0.15"), cached_input=Decimal("0.015"), output=Decimal("0.6"), currency="USD"
    )


@pytest.mark.parametrize("wrong", ["-1", "1e-7", "nan", "inf", "1000001", '"much"'])
def test_what_is_no_price_is_refused(wrong: str) -> None:
    """Below nothing, finer than a millionth, no number: the line says what a price is."""
    with pytest.raises(BadRequest, match=r"models\.toml"):
        Catalogue.parse(CATALOGUE.format(input=wrong, currency="USD"))


@pytest.mark.parametrize("currency", ["usd", "EURO", "", "€"])
def test_a_currency_has_three_letters(currency: str) -> None:
    """As ISO 4217 writes them."""
    with pytest.raises(BadRequest, match="currency"):
        Catalogue.parse(CATALOGUE.format(input="1", currency=currency))


@pytest.mark.parametrize(
    ("entry", "tokens", "cost"),
    [
        (price("3", "15"), (1_000_000, 0, 0), 3_000_000),
        (price("3", "15"), (0, 0, 1_000_000), 15_000_000),
        (price("3", "15", "0.3"), (100, 40, 10), 60 * 3 + 12 + 150),
        (price("3", "15"), (100, 40, 10), 300 + 150),  # cached ones as others
        (price("0.5", "0"), (1, 0, 0), 1),  # half a millionth is rounded up
        (price("0.499999", "0"), (1, 0, 0), 0),
        (price("0", "0"), (5, 5, 5), 0),
    ],
)
def test_costs(entry: PriceEntry, tokens: tuple[int, int, int], cost: int) -> None:
    """Prompt, cached part of it and answer, each at its price; rounded once."""
    assert entry.cost_micros(*tokens) == cost


@given(
    st.tuples(*[st.decimals(0, 1_000_000, places=6)] * 3),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
)
def test_a_cost_is_the_true_one_rounded(
    prices: tuple[Decimal, Decimal, Decimal], fresh: int, cached: int, answer: int
) -> None:
    """It is within half a millionth of what fractions say, whatever the numbers."""
    entry = PriceEntry(input=prices[0], output=prices[1], cached_input=prices[2], currency="EUR")
    true = fresh * Fraction(prices[0]) + answer * Fraction(prices[1]) + cached * Fraction(prices[2])
    cost = entry.cost_micros(fresh + cached, cached, answer)
    assert isinstance(cost, int)
    assert -Fraction(1, 2) < cost - true <= Fraction(1, 2)


def test_a_price_survives_being_replaced() -> None:
    """Entries are compared when models are named twice: equal prices are equal."""
    assert msgspec.structs.replace(price("1.0", "2")) == price("1", "2.00")
