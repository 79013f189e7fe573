"""Requests that kill workers: how one is found among many, and kept away. Pure.

When a worker dies every answer open on it may be the cause. Those that had a token from it are unlikely
to be and move at once; the others are suspects and are tried again one at a time a worker, until they
speak. A suspect whose second worker dies too, and who is the only such one there, is the cause: its
fingerprint is barred for `TTL_S`. So a request that kills at its prompt costs two workers, one that
kills in mid-answer three.

A worker may hang instead: it falls silent, and answers leave it before it is known to be lost. If it is
lost in the end, and did not speak in between, those that left and have not got a token since are suspects as
if they had stayed. One that was silent for a moment makes nobody suspect.

A fingerprint is a keyed digest of what decides the computation (scope, prompt, bias, constraint), not of
seed, temperature or lengths; no text can be found from it, and other tenants' requests never match.
"""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
from blake3 import blake3

from antiphon.core.clock import Clock
from antiphon.core.generation import Generation
from antiphon.router.answer import Answer

TTL_S = 600.0
MAX_FINGERPRINTS = 1024


class Quarantine:
    """The fingerprints that are barred now."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._until_s: OrderedDict[bytes, float] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        self._expire()
        return len(self._until_s)

    def add(self, generation: Generation) -> None:
        """Bar what is like this one; the oldest goes where there are too many."""
        fingerprint = self._fingerprint(generation)
        self._until_s[fingerprint] = self._clock.now() + TTL_S
        self._until_s.move_to_end(fingerprint)
        if len(self._until_s) > MAX_FINGERPRINTS:
            self._until_s.popitem(last=False)

    def holds(self, generation: Generation) -> bool:
        """Whether this one is barred."""
        self._expire()
        return bool(self._until_s) and self._fingerprint(generation) in self._until_s

    def _expire(self) -> None:
        now = self._clock.now()
        while self._until_s and next(iter(self._until_s.values())) <= now:
            self._until_s.popitem(last=False)

    def _fingerprint(self, generation: Generation) -> bytes:
        sampling = generation.sampling
        prompt = array("I", generation.token_ids[: generation.num_prompt_tokens]).tobytes()
        fields = [
            generation.model,
            generation.kv_scope,
            prompt,
            generation.messages,
            generation.constraint,
            generation.lora,
            sampling.logit_bias,
            sampling.logprobs,
        ]
        return blake3(msgspec.msgpack.encode(fields), key=self._key).digest(16)


class Leavers:
    """Answers that left silent workers before these spoke to them. `worker`: an address."""

    def __init__(self) -> None:
        self._left: dict[str, list[tuple[Answer, int]]] = {}  # with the tokens each had then

    def note(self, worker: str, answer: Answer) -> None:
        """It leaves; the worker has said nothing to it."""
        self._left.setdefault(worker, []).append((answer, answer.num_received))

    def forget(self, worker: str) -> None:
        """The worker speaks again."""
        self._left.pop(worker, None)

    def take(self, worker: str) -> list[Answer]:
        """The worker is lost: those that have got nothing since."""
        left = self._left.pop(worker, [])
        return [answer for answer, num_then in left if answer.num_received == num_then]


def culprit(suspects: Sequence[Answer]) -> Answer | None:
    """The answer that killed a worker, if it is plain. `suspects` were there without a token from it."""
    again = {id(answer): answer for answer in suspects if answer.num_suspicions}
    return next(iter(again.values())) if len(again) == 1 else None
