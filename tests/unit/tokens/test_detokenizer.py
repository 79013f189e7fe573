"""tokens.detokenizer: the named cases; tests/property covers all splits."""

from __future__ import annotations

import pytest

from antiphon.core.errors import BadRequest
from antiphon.tokens.bytelevel import IM_END, ByteTokenizer
from antiphon.tokens.detokenizer import Delta, Detokenizer


class Words:
    """A vocabulary of whole pieces: id i stands for the i-th."""

    bos_id = None
    end_ids = ()

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces
        self.vocab_size = len(pieces)
        self.special_tokens: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self.pieces.index(text.encode())]

    def piece(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def name(self, token_id: int) -> str:
        return self.pieces[token_id].decode(errors="replace")


def stream(detokenizer: Detokenizer, *ids: int) -> list[Delta]:
    """One push a token, then the end."""
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.finish()]


def test_text_without_stops_is_released_at_once() -> None:
    """Nothing is held where nothing can match."""
    detokenizer = Detokenizer(Words(b"Hello", b" there"))
    assert stream(detokenizer, 0, 1) == [
        Delta("Hello", 1, False),
        Delta(" there", 1, False),
        Delta("", 0, False),
    ]


def test_an_emoji_waits_for_its_last_byte() -> None:
    """Four tokens, one character: their logprobs travel together with it (B03)."""
    deltas = stream(Detokenizer(ByteTokenizer()), *"🙂!".encode())
    assert [(d.text, d.num_tokens) for d in deltas] == [("", 0)] * 3 + [("🙂", 4), ("!", 1), ("", 0)]


def test_a_truncated_character_is_flushed_as_one_replacement() -> None:
    """An answer that ends in half an emoji shows one U+FFFD, and only at its end."""
    deltas = stream(Detokenizer(ByteTokenizer()), *"a🙂".encode()[:-1])
    assert "".join(d.text for d in deltas) == "a\ufffd"
    assert deltas[-1] == Delta("\ufffd", 3, False)


def test_bytes_that_cannot_begin_a_character_are_replaced_at_once() -> None:
    """0xFF is invalid whatever follows; 0xE2 is so only once a letter follows."""
    deltas = stream(Detokenizer(ByteTokenizer()), 0xFF, 0xE2, ord("a"))
    assert [d.text for d in deltas] == ["\ufffd", "", "\ufffda", ""]
    assert [d.num_tokens for d in deltas] == [1, 0, 2, 0]


def test_a_stop_over_two_tokens_is_held_and_removed() -> None:
    """Nothing of a stop string is ever emitted, and it stops at once (B06, B07)."""
    detokenizer = Detokenizer(Words(b"abcDEF", b"GHIJ", b"kl"), ["DEFGHIJ"])
    assert detokenizer.push([0]) == Delta("abc", 0, False)
    assert detokenizer.push([1]) == Delta("", 1, True)
    assert detokenizer.is_stopped


def test_text_that_only_began_a_stop_is_flushed_with_its_logprobs() -> None:
    """Held tokens come out together once the stop is ruled out, one logprob each (B17)."""
    detokenizer = Detokenizer(Words(b"Hello", b"!", b" x"), ["Hello!!"])
    assert [detokenizer.push([0]), detokenizer.push([1])] == [Delta("", 0, False)] * 2
    assert detokenizer.push([2]) == Delta("Hello! x", 3, False)


def test_a_held_prefix_is_flushed_at_the_end() -> None:
    """The answer's end rules the stop out."""
    deltas = stream(Detokenizer(Words(b"one\nUs"), ["\nUser:"]), 0)
    assert deltas == [Delta("one", 0, False), Delta("\nUs", 1, False)]


def test_the_stop_that_is_complete_first_wins() -> None:
    """The stop string that is complete first ends the answer; of two complete together, the longer."""
    assert Detokenizer(Words(b"a. b\n"), ["\n", ". "]).push([0]).text == "a"
    assert Detokenizer(Words(b"x\nUser:"), ["User:", "\nUser:"]).push([0]).text == "x"


def test_overlapping_beginnings_of_a_stop_are_seen() -> None:
    """A stop that begins inside a failed beginning of itself is found."""
    deltas = stream(Detokenizer(ByteTokenizer(), ["aab"]), *b"aaab")
    assert "".join(d.text for d in deltas) == "a"
    assert deltas[-2].stopped


def test_tokens_behind_a_stop_do_not_count() -> None:
    """The token in which the stop begins counts if it has text before it; later ones do not."""
    detokenizer = Detokenizer(Words(b"ab", b"c#", b"#d", b"e"), ["##"])
    assert detokenizer.push([0, 1, 2, 3]) == Delta("abc", 2, True)
    assert Detokenizer(Words(b"ab", b"##d"), ["##"]).push([0, 1]) == Delta("ab", 1, True)


def test_nothing_is_released_after_a_stop() -> None:
    """Later tokens and the end are swallowed."""
    detokenizer = Detokenizer(Words(b"a#", b"b"), ["#"])
    assert detokenizer.push([0]) == Delta("a", 1, True)
    assert [detokenizer.push([1]), detokenizer.finish(), detokenizer.finish()] == [Delta("", 0, True)] * 3


def test_control_tokens_count_without_text() -> None:
    """A control token in the answer has no text but its logprob still travels."""
    deltas = stream(Detokenizer(ByteTokenizer()), ord("a"), IM_END, ord("b"))
    assert [(d.text, d.num_tokens) for d in deltas] == [("a", 1), ("", 1), ("b", 1), ("", 0)]


def test_finish_may_be_called_twice() -> None:
    """The second end has nothing left."""
    detokenizer = Detokenizer(ByteTokenizer(), ["ab"])
    detokenizer.push(b"a")
    assert detokenizer.finish() == Delta("a", 1, False)
    assert detokenizer.finish() == Delta("", 0, False)


def test_empty_stop_strings_are_refused() -> None:
    """An empty string matches everywhere, so nobody can mean it (W27)."""
    with pytest.raises(BadRequest) as caught:
        Detokenizer(ByteTokenizer(), ["a", ""])
    assert caught.value.param == "stop"


def test_a_stop_in_a_replacement_character_ends_the_answer_at_its_end() -> None:
    """U+FFFD is text like any other, also when the end brings it."""
    detokenizer = Detokenizer(ByteTokenizer(), ["\ufffd"])
    assert detokenizer.push([ord("a"), 0xE2]) == Delta("a", 1, False)
    assert detokenizer.finish() == Delta("", 0, True)
