"""tokens.detokenizer against a reference that sees the whole answer at once."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from antiphon.tokens.bytelevel import ByteTokenizer
from antiphon.tokens.detokenizer import Delta, Detokenizer

# Few letters, so that stops match, half match and overlap; characters of 1 to 4 bytes; invalid bytes.
LETTERS = "aabé€🙂"
stops = st.lists(st.text("aabé🙂", min_size=1, max_size=5), max_size=4)
clean = st.text(LETTERS, max_size=30).map(str.encode)
dirty = st.lists(
    st.sampled_from([b"a", b"b", "é".encode(), "🙂".encode(), b"\xf0\x9f", b"\xe2", b"\x80", b"\xff"]),
    max_size=20,
).map(b"".join)


class Chunks:
    """A vocabulary made by cutting an answer's bytes: id i is the i-th chunk, empty ones included."""

    bos_id = None
    end_ids = ()
    special_tokens: dict[str, int] = {}  # noqa: RUF012 - the protocol asks for a dict

    def __init__(self, data: bytes, cuts: list[int]) -> None:
        borders = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
        self.pieces = [data[a:b] for a, b in itertools.pairwise(borders)]
        self.vocab_size = len(self.pieces)

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def piece(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def name(self, token_id: int) -> str:
        return repr(self.pieces[token_id])


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """Cut at the stop string that is complete first; of several complete there, at the longest."""
    matches = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(matches)[1]], True) if matches else (text, False)


def run(detokenizer: Detokenizer, pushes: list[list[int]]) -> list[Delta]:
    return [*map(detokenizer.push, pushes), detokenizer.finish()]


def grouped(num_tokens: int, groups: list[int]) -> list[list[int]]:
    """Token ids 0 … num_tokens - 1 in pushes of these sizes, the rest one by one."""
    ids = list(range(num_tokens))
    pushes = []
    for size in groups:
        pushes.append(ids[:size])
        ids = ids[size:]
    return [*pushes, *([token_id] for token_id in ids)]


@given(
    clean | dirty, st.lists(st.integers(0, 99), max_size=12), st.lists(st.integers(0, 4), max_size=6), stops
)
def test_any_tokens_any_pushes_any_stops(
    data: bytes, cuts: list[int], groups: list[int], stops: list[str]
) -> None:
    """However an answer is cut into tokens and pushes, its text is the reference's."""
    tokenizer = Chunks(data, cuts)
    deltas = run(Detokenizer(tokenizer, stops), grouped(tokenizer.vocab_size, groups))
    expected = reference(data.decode(errors="replace"), stops)
    assert ("".join(delta.text for delta in deltas), deltas[-1].stopped) == expected


@given(st.text(LETTERS, max_size=8).map(str.encode) | dirty, stops)
def test_every_split_in_two(data: bytes, stops: list[str]) -> None:
    """At each single split, in mid-character and in mid-stop too, the text is the reference's."""
    expected = reference(data.decode(errors="replace"), stops)
    for cut in range(len(data) + 1):
        deltas = run(Detokenizer(Chunks(data, [cut]), stops), [[0], [1]])
        assert ("".join(delta.text for delta in deltas), deltas[-1].stopped) == expected


@given(clean | dirty, st.lists(st.integers(0, 99), max_size=12), stops)
def test_each_released_token_counts_once(data: bytes, cuts: list[int], stops: list[str]) -> None:
    """The counts add up to the tokens of which any text was released; without a stop to all of them."""
    tokenizer = Chunks(data, cuts)
    deltas = run(Detokenizer(tokenizer, stops), grouped(tokenizer.vocab_size, []))
    counted = sum(delta.num_tokens for delta in deltas)
    if not deltas[-1].stopped:
        assert counted == tokenizer.vocab_size
        return
    num_released = sum(len(delta.text) for delta in deltas)
    num_pushed = next(at for at, delta in enumerate(deltas) if delta.stopped) + 1
    assert counted == num_begun(tokenizer.pieces[:num_pushed], num_released)


def num_begun(pieces: list[bytes], num_characters: int) -> int:
    """How many tokens begin before the `num_characters`-th character, or have no text and end there."""
    count, before = 0, b""
    for piece in pieces:
        is_inside = is_open(before)  # its first byte goes on with a character that has begun
        start = len(before.decode(errors="replace")) - is_inside
        count += start < num_characters or (start == num_characters and not piece and not is_inside)
        before += piece
    return count


def is_open(data: bytes) -> bool:
    """The bytes end inside a character that could still become valid."""
    return any(
        data[-size:] == whole[:size]
        for whole in ("é".encode(), "€".encode(), "🙂".encode())
        for size in range(1, len(whole))
        if len(data) >= size
    )


@given(clean | dirty, st.lists(st.integers(0, 99), max_size=12), stops)
def test_a_token_never_travels_before_its_last_character(
    data: bytes, cuts: list[int], stops: list[str]
) -> None:
    """After each delta the counted tokens' bytes are covered by the text released so far."""
    tokenizer = Chunks(data, cuts)
    detokenizer = Detokenizer(tokenizer, stops)
    text, counted = "", 0
    for token_id in range(tokenizer.vocab_size):
        delta = detokenizer.push([token_id])
        text, counted = text + delta.text, counted + delta.num_tokens
        if delta.stopped:
            return
        out = b"".join(tokenizer.pieces[:counted])
        assert len(out.decode(errors="replace")) <= len(text)


@given(st.text(LETTERS, max_size=30), stops)
def test_held_text_is_always_the_beginning_of_a_stop(text: str, stops: list[str]) -> None:
    """What is not out yet, of the whole characters so far, could still become a stop string."""
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer, stops)
    released, seen = "", ""
    for character in text:
        delta = detokenizer.push(tokenizer.encode(character))
        released, seen = released + delta.text, seen + character
        if delta.stopped:
            return
        held = seen[len(released) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
