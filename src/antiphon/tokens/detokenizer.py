"""Answer tokens to text, piece by piece, up to a stop string.

Owns the bytes of an unfinished character and the text that could still turn out to begin a stop
string. What it promises, however the tokens are grouped into pushes:

* All released texts joined are the text of all tokens up to the stop, without it.
* U+FFFD stands only for bytes that no continuation could have made valid.
* The answer ends where a stop string is first complete; of several complete there, the longest
  counts. Text that cannot be part of a stop string is never held back.
* A token belongs to the delta that releases the last character its bytes are part of. A stop cuts
  off the tokens whose text begins at its first character or behind; one that begins before it
  counts. So the counts of all deltas add up to the tokens whose text, or part of it, was released,
  and those without text that came before the stop.

Does not know about ends of turn: the engine keeps those tokens to itself.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.core.errors import BadRequest
from antiphon.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Delta:
    """Text released by one push, and how many of the waiting tokens' logprobs travel with it."""

    text: str
    num_tokens: int
    stopped: bool


class Detokenizer:
    """One answer's text. `push` costs O(new text × stop strings), the held text is below one stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        """Raises BadRequest for an empty stop string: it would match everywhere."""
        if not all(stops):
            raise BadRequest("A stop string must not be empty.", param="stop")
        self._tokenizer = tokenizer
        self._stops = [_StopMatcher(stop) for stop in dict.fromkeys(stops)]
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._num_released = 0  # characters
        self._waiting: deque[tuple[int, int]] = deque()  # characters [start, end) of tokens not yet released
        self._stopped = False

    @property
    def is_stopped(self) -> bool:
        """A stop string was complete; nothing more will be released."""
        return self._stopped

    def push(self, ids: Sequence[int]) -> Delta:
        """Take the next answer tokens. Raises IndexError for an id outside the vocabulary."""
        if self._stopped:
            return Delta("", 0, True)
        fresh: list[str] = []
        num_decoded = self._num_released + len(self._held)
        for token_id in ids:
            start = num_decoded
            text = self._decoder.decode(self._tokenizer.piece(token_id))
            num_decoded += len(text)
            # Bytes left in the decoder become one character, be it a real one or U+FFFD.
            self._waiting.append((start, num_decoded + self._has_partial_character()))
            fresh.append(text)
        return self._take("".join(fresh))

    def finish(self) -> Delta:
        """The answer is over: release what was held back. Safe to call twice."""
        if self._stopped:
            return Delta("", 0, True)
        delta = self._take(self._decoder.decode(b"", final=True))
        if delta.stopped:
            return delta
        rest, self._held = self._held, ""
        num_tokens = delta.num_tokens + self._release(len(rest))
        return Delta(delta.text + rest, num_tokens, False)

    def _has_partial_character(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def _take(self, fresh: str) -> Delta:
        """Match `fresh` (the text behind the held one) and release what no stop can claim."""
        text = self._held + fresh
        stop_start = self._find_stop(fresh, len(text))
        if stop_start is not None:
            return self._stop(text[:stop_start])
        num_held = max((matcher.num_matched for matcher in self._stops), default=0)
        released, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        return Delta(released, self._release(len(released)), False)

    def _find_stop(self, fresh: str, num_text: int) -> int | None:
        """Where in the text the stop begins that is complete first, or None."""
        first: tuple[int, int] | None = None  # (end, start): the least end, then the longest stop
        for matcher in self._stops:
            end = matcher.feed(fresh)
            if end is not None:
                end += num_text - len(fresh)
                first = min(first or (end, end), (end, end - matcher.length))
        return None if first is None else first[1]

    def _stop(self, text: str) -> Delta:
        self._stopped = True
        self._held = ""
        self._num_released += len(text)
        num_tokens = sum(
            start < self._num_released or end <= self._num_released for start, end in self._waiting
        )
        self._waiting.clear()
        return Delta(text, num_tokens, True)

    def _release(self, num_characters: int) -> int:
        """Count the tokens that are wholly out once this many more characters are."""
        self._num_released += num_characters
        num_tokens = 0
        while self._waiting and self._waiting[0][1] <= self._num_released:
            self._waiting.popleft()
            num_tokens += 1
        return num_tokens


class _StopMatcher:
    """Knuth–Morris–Pratt over a stream: how much of one stop string the text so far ends in."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._fallback = _fallbacks(stop)
        self.num_matched = 0

    @property
    def length(self) -> int:
        return len(self._stop)

    def feed(self, text: str) -> int | None:
        """The end of the first match within `text` (it may have begun before), or None."""
        stop, matched, at = self._stop, self.num_matched, 0
        while at < len(text):
            if matched == 0:  # most text is far from any stop string: let C look for its first character
                at = text.find(stop[0], at)
                if at < 0:
                    break
            character = text[at]
            while matched and stop[matched] != character:
                matched = self._fallback[matched - 1]
            if stop[matched] == character:
                matched += 1
                if matched == len(stop):
                    return at + 1
            at += 1
        self.num_matched = matched
        return None


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    fallback = [0] * len(stop)
    matched = 0
    for at in range(1, len(stop)):
        while matched and stop[at] != stop[matched]:
            matched = fallback[matched - 1]
        matched += stop[at] == stop[matched]
        fallback[at] = matched
    return fallback
