"""Text of others on a terminal."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.cli.terminal import make_safe, make_valid


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, tabs\tand\nlines, 日本語 🎵", "plain text, tabs\tand\nlines, 日本語 🎵"),
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("\x1b[2J\x1b[31mred", "␛[2J␛[31mred"),
        ("over\rwrite", "overwrite"),
        ("\x9b31m", "\ufffd31m"),
        ("\x7f\x00\x08", "␡␀␈"),
        ("abc\u202ecba", "abc<U+202E>cba"),
    ],
)
def test_control_characters_are_shown(text: str, shown: str) -> None:
    """What would steer the terminal is made visible; other text stays as it is."""
    assert make_safe(text) == shown


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    """Of any text only newlines and tabs remain of the control characters."""
    left = {c for c in make_safe(text) if unicodedata.category(c) == "Cc"}
    assert left <= {"\n", "\t"}


@given(st.text(), st.integers(min_value=0))
def test_pieces_are_as_safe_as_the_whole(text: str, at: int) -> None:
    """A stream may be cut anywhere: the pieces' safe texts make the whole's."""
    at = min(at, len(text))
    assert make_safe(text[:at]) + make_safe(text[at:]) == make_safe(text)


@given(st.binary())
def test_any_input_can_be_sent(data: bytes) -> None:
    """Bytes that were no UTF-8 become text that is."""
    text = data.decode("utf-8", "surrogateescape")
    make_valid(text).encode("utf-8")
