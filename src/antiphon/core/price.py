"""What tokens cost: prices as an operator writes them, costs as whole numbers.

Invariants: a price is exact to a millionth of its currency; a cost is rounded once, at its end, half a
millionth up; no float takes part.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

import msgspec

_PER = 1_000_000  # tokens that a price is for
_MICROS = 1_000_000  # in a unit of the currency
_MAX_PRICE = 1_000_000


class PriceEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a million tokens each. `cached_input`: of prompt tokens not computed anew; None: as of others."""

    input: Decimal
    output: Decimal
    cached_input: Decimal | None = None
    currency: Annotated[str, msgspec.Meta(pattern="^[A-Z]{3}$")]  # as ISO 4217 has it

    def __post_init__(self) -> None:
        for price in (self.input, self.output, self.cached_input):
            if price is None:
                continue
            if not (price.is_finite() and 0 <= price <= _MAX_PRICE and price * _MICROS % 1 == 0):
                raise ValueError(
                    f"{price} is no price: for a million tokens, 0 to {_MAX_PRICE}, six decimals at most"
                )

    def cost_micros(self, prompt_tokens: int, cached_tokens: int, answer_tokens: int) -> int:
        """Millionths of the currency; the prompt's tokens hold the cached ones."""
        cached = self.input if self.cached_input is None else self.cached_input
        total = (
            (prompt_tokens - cached_tokens) * _micros(self.input)
            + cached_tokens * _micros(cached)
            + answer_tokens * _micros(self.output)
        )
        return (2 * total + _PER) // (2 * _PER)


def _micros(price: Decimal) -> int:
    return int(price * _MICROS)
