"""Text that others wrote, made harmless for a terminal.

A model's text may hold anything. Control characters (which move the cursor, rename the window or
send keys back) and those that turn the reading direction are shown, never obeyed. Newlines and tabs
stay; a carriage return goes, for alone it would let text overwrite the text before it.
"""

from __future__ import annotations

_C0 = {code: chr(0x2400 + code) for code in range(0x20) if code not in (0x09, 0x0A, 0x0D)}
_C1 = {code: "\N{REPLACEMENT CHARACTER}" for code in range(0x80, 0xA0)}
_DIRECTION = {
    code: f"<U+{code:04X}>"
    for code in (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
_SAFE = {**_C0, **_C1, **_DIRECTION, 0x0D: "", 0x7F: "\N{SYMBOL FOR DELETE}"}


def make_safe(text: str) -> str:
    """The text with control characters shown instead of sent. Works on any piece of a longer text."""
    return text.translate(_SAFE)


def make_valid(text: str) -> str:
    """The text with what was no UTF-8 on the way in replaced, so that it can be sent as JSON."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
