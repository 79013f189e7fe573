"""How fast a queue is served, what a request is expected to need: both learned from what happened. Pure."""

from __future__ import annotations

from antiphon.core.wait import ANSWER_TOKENS

HALF_LIFE_S = 4.0
LEAST_S = 0.5  # of waiting that must have been seen before the rate is believed
_NEWEST = 0.05  # weight of the newest request in what is expected of the next


class ServiceRate:
    """Tokens a second that start while others wait: time in which nobody waited says nothing of capacity."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._seen_s: float | None = None  # None: nobody waits

    @property
    def tokens_per_s(self) -> float | None:
        """None: not known yet."""
        return self._tokens / self._seconds if self._seconds >= LEAST_S and self._tokens > 0 else None

    def begin(self, now_s: float) -> None:
        """Somebody waits."""
        if self._seen_s is None:
            self._seen_s = now_s

    def started(self, num_tokens: int, now_s: float) -> None:
        """One that had waited starts."""
        self._pass(now_s)
        self._tokens += num_tokens

    def end(self, now_s: float) -> None:
        """Nobody waits any more."""
        self._pass(now_s)
        self._seen_s = None

    def _pass(self, now_s: float) -> None:
        if self._seen_s is None:
            return
        seconds = max(now_s - self._seen_s, 0.0)
        fading = 0.5 ** (seconds / HALF_LIFE_S)
        self._tokens *= fading
        self._seconds = self._seconds * fading + seconds
        self._seen_s = now_s


class Expectation:
    """What requests to one model turn out to need."""

    def __init__(self) -> None:
        self._answer_tokens = float(ANSWER_TOKENS)
        self._uncached_share = 1.0

    def num_tokens(self, num_prompt_tokens: int, most_answer_tokens: int, num_choices: int) -> int:
        """Prompt tokens to be computed and answer tokens of all choices together; at least 1."""
        answer_tokens = min(self._answer_tokens, most_answer_tokens) * num_choices
        return max(round(num_prompt_tokens * self._uncached_share + answer_tokens), 1)

    def learn(self, num_prompt_tokens: int, num_cached_tokens: int, answer_tokens: float) -> None:
        """So it was; `answer_tokens` of each choice."""
        self._answer_tokens += _NEWEST * (answer_tokens - self._answer_tokens)
        if num_prompt_tokens > 0:
            share = min(max(1 - num_cached_tokens / num_prompt_tokens, 0.0), 1.0)
            self._uncached_share += _NEWEST * (share - self._uncached_share)
