"""Origins: how they are written, and which are let through."""

from __future__ import annotations

import pytest

from antiphon.core.errors import BadRequest
from antiphon.gateway.cors import Origins, check_origin


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://app.example", "https://app.example"),
        ("HTTPS://App.Example", "https://app.example"),
        ("https://app.example:443", "https://app.example"),
        ("http://app.example:443", "http://app.example:443"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("*", "*"),
    ],
)
def test_origins(text: str, origin: str) -> None:
    """An origin is kept as browsers spell it: lower case, no port where it is the scheme's own."""
    assert check_origin(text) == origin


@pytest.mark.parametrize(
    "text",
    [
        *("", "app.example", "https://", "https://app.example/", "https://app.example/path", "ftp://a"),
        *("https://a b", "https://*.example", "https://u@app.example", "https://app.example?x", "null"),
        *("https://app.example:0", "https://app.example:65536", "https://app.example:x", "https://é"),
        *("https://app.example\n", "https://a, https://b", "https://a#", "file://x", "**"),
    ],
)
def test_what_is_no_origin(text: str) -> None:
    """Paths, patterns, lists and other schemes are refused, in words that say what an origin is."""
    with pytest.raises(BadRequest, match="is no origin"):
        check_origin(text)


def test_only_exact_origins_are_allowed() -> None:
    """Neither what begins nor what ends like one; the list is the whole truth, `*` is everything."""
    origins = Origins(["https://app.example"])
    assert origins.allow("https://app.example")
    for other in ("http://app.example", "https://app.example.evil", "https://x.app.example", "null", ""):
        assert not origins.allow(other)
        assert Origins(["*"]).allow(other)
        assert not Origins().allow(other)
