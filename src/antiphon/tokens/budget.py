"""What one render of a chat template may still do.

Owns the two counters, steps and characters, and the sizing of operations that make much out of
little. Everything is spent BEFORE it is done, so a render that runs out has not done it.
Knows nothing of Jinja.
"""

from __future__ import annotations

from collections.abc import ItemsView, KeysView, Sequence, ValuesView

_ELEMENT_CHARACTERS = 16  # what an element of a list weighs, in characters
_MAX_INT_BITS = 256


class OverBudget(Exception):
    """The template wanted to do more than it may. The message says what, in words."""


class Budget:
    """Steps are iterations, calls and operations; characters are made, copied or compared ones."""

    __slots__ = ("num_characters", "num_steps")

    def __init__(self, num_steps: int, num_characters: int) -> None:
        self.num_steps = num_steps
        self.num_characters = num_characters

    def spend(self, num_characters: int = 0) -> None:
        """Take one step over this many characters. Raises OverBudget."""
        self.num_steps -= 1
        self.num_characters -= num_characters
        if self.num_steps < 0 or self.num_characters < 0:
            raise OverBudget("it does more work than a chat template may")

    def weigh(self, value: object) -> None:
        """Spend what handling all of `value` costs, elements of elements included."""
        if isinstance(value, dict):
            self.weigh(value.items())
        elif isinstance(value, list | tuple | set | frozenset | ItemsView | KeysView | ValuesView):
            self.spend(_ELEMENT_CHARACTERS * len(value))
            for item in value:
                self.weigh(item)
        else:
            self.spend(len(value) if isinstance(value, str) else 1)

    def weigh_surface(self, value: object) -> None:
        """Spend what copying `value` costs when its elements exist already."""
        if isinstance(value, list | tuple | dict):
            self.spend(_ELEMENT_CHARACTERS * len(value))
        else:
            self.spend(len(value) if isinstance(value, str) else 1)

    def spend_joining(self, separator: str, items: Sequence[object]) -> None:
        """Before `separator.join(items)`."""
        self.weigh(items)
        self.spend(len(separator) * len(items))

    def spend_replacing(self, text: str, old: str, new: str) -> None:
        """Before `text.replace(old, new)`."""
        self.spend(len(text))
        self.spend(text.count(old) * len(new))

    def spend_multiplying(self, left: object, right: object) -> None:
        """Before `left * right`, be it a text or a list repeated, or a product of numbers."""
        for repeated, times in ((left, right), (right, left)):
            if isinstance(repeated, str | list | tuple) and isinstance(times, int):
                unit = 1 if isinstance(repeated, str) else _ELEMENT_CHARACTERS
                self.spend(len(repeated) * max(times, 0) * unit)
                return
        self._check_bits(_bits(left) + _bits(right))

    def spend_raising(self, base: object, exponent: object) -> None:
        """Before `base ** exponent`."""
        if isinstance(exponent, int):
            self._check_bits(_bits(base) * abs(exponent))

    def _check_bits(self, num_bits: int) -> None:
        self.spend(1)
        if num_bits > _MAX_INT_BITS:
            raise OverBudget("it computes a number of more than 256 bits")


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 0
