"""The form of keys."""

from __future__ import annotations

import pytest

from antiphon.store.apikey import PREFIX, digest_of, make_key, shown_of


def test_keys_are_long_and_new() -> None:
    """48 characters of randomness behind the prefix, never the same twice."""
    keys = {make_key() for _ in range(1000)}
    assert len(keys) == 1000
    assert {len(key) for key in keys} == {len(PREFIX) + 48}
    assert all(digest_of(key) is not None for key in keys)


def test_digest_is_of_the_whole_key() -> None:
    """Keys that differ in their last character alone have nothing in common in the database."""
    key = PREFIX + 47 * "a"
    digests = {digest_of(key + last) for last in "abc"}
    assert len(digests) == 3
    assert digest_of(key + "a") == digest_of(key + "a")
    assert {len(digest or b"") for digest in digests} == {32}


def test_digest_stays_what_it_is() -> None:
    """A changed digest would lock out every key that was ever given away."""
    digest = digest_of(PREFIX + 48 * "A")
    assert digest is not None
    assert digest.hex() == "10de2e478582b07b282204b9a906d7f757d0af091eac7cf1ab7d7a80d47cf117"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "any",
        PREFIX,
        PREFIX + 47 * "a",
        PREFIX + 49 * "a",
        PREFIX + 47 * "a" + "\n",
        PREFIX + 48 * "a" + "\n",
        " " + PREFIX + 48 * "a",
        PREFIX + 47 * "a" + "'",
        PREFIX + 47 * "a" + "é",
        PREFIX + 48 * "٣",
        "' OR 1=1; --",
    ],
)
def test_other_texts_are_no_keys(text: str) -> None:
    """What was never made here is not even looked up."""
    assert digest_of(text) is None


def test_little_is_shown() -> None:
    """Of what is random four characters are shown: more than 256 bits stay secret."""
    key = make_key()
    assert shown_of(key) == key[: len(PREFIX) + 4]
