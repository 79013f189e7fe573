"""Contexts that `bench kv-type` measures: one a KV format, over one loaded model.

A side reads a text once, cuts its KV into blocks as the product does, and begins sequences with copies of
them: so many sequences hold much context without computing it again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from antiphon.engine.kvstate import BlockCut, KvLayout
from antiphon.engine.kvtype import KvType
from antiphon.engine.llamabatch import Row
from antiphon.engine.llamacontext import ContextShape, LlamaContext
from antiphon.engine.runner import Logits
from bench.load import median

BLOCK_TOKENS = 32
STEP_TOKENS = 256
NUM_STREAMS = 10


@dataclass(frozen=True, slots=True)
class Variant:
    """A format, with or without flash attention."""

    kv_type: KvType
    flash: bool

    def __str__(self) -> str:
        return f"{self.kv_type.value}, flash attention {'on' if self.flash else 'off'}"


VARIANTS = (
    Variant(KvType.F16, flash=False),
    Variant(KvType.F16, flash=True),
    Variant(KvType.Q8_0, flash=True),
    Variant(KvType.Q4_0, flash=True),
)


class Side:
    """A context of one variant. Stream 0 reads the text first; then all streams begin with copies of it."""

    def __init__(self, model: int, variant: Variant, text_tokens: int) -> None:
        self._context = LlamaContext(
            model,
            ContextShape(
                num_streams=NUM_STREAMS,
                stream_tokens=text_tokens + STEP_TOKENS,
                step_tokens=STEP_TOKENS,
                threads=num_threads(),
                flash_attention=variant.flash,
                kv_type=variant.kv_type,
            ),
        )
        self._layout: KvLayout | None = None
        self._payloads: list[bytes] = []
        self._next = 0

    def read(self, ids: Sequence[int]) -> Logits:
        """Logits of every position of the text, and its KV cut into blocks."""
        parts = []
        for start in range(0, len(ids), STEP_TOKENS):
            chunk = ids[start : start + STEP_TOKENS]
            self._context.decode([Row(0, start + i, [token], True) for i, token in enumerate(chunk)])
            parts.append(self._context.logits(len(chunk)).copy())
        blob = self._context.read(0)
        self._layout = KvLayout.learn(blob.tobytes(), len(ids), NUM_STREAMS)
        cut = BlockCut(BLOCK_TOKENS, list(range(len(ids) // BLOCK_TOKENS)))
        self._payloads = self._layout.split(blob, len(ids), 0, cut)
        return np.concatenate(parts)

    def hold(self, num_tokens: Sequence[int]) -> None:
        """Let the streams hold so many tokens of the text each."""
        assert self._layout is not None
        for stream, count in enumerate(num_tokens):
            payloads = self._payloads[: -(-count // BLOCK_TOKENS)]
            self._context.write(stream, self._layout.join(payloads, stream, BLOCK_TOKENS))
            self._context.truncate(stream, count)
        self._next = num_tokens[0]

    def prefill_s(self, ids: Sequence[int]) -> float:
        """Seconds of one step of at most `STEP_TOKENS` behind what stream 0 holds; that stays as it is."""
        start = self._next
        seconds = self._timed([Row(0, start, list(ids), True)])
        self._context.truncate(0, start)
        return seconds

    def decode_s(self, num_streams: int, num_steps: int) -> float:
        """Median seconds of steps of one token each; the streams hold no more afterwards."""
        times = []
        for position in range(self._next, self._next + num_steps):
            times.append(self._timed([Row(s, position, [100 + s], True) for s in range(num_streams)]))
        for stream in range(num_streams):
            self._context.truncate(stream, self._next)
        return median(times)

    def answers(self, ids: Sequence[int], num_held: Sequence[int], num_tokens: int) -> list[list[int]]:
        """Greedy continuations of beginnings of the text, one a stream."""
        self.hold([count - 1 for count in num_held])
        last = [ids[count - 1] for count in num_held]
        found: list[list[int]] = [[] for _ in num_held]
        for step in range(num_tokens):
            places = zip(num_held, last, strict=True)
            self._context.decode([Row(s, n - 1 + step, [token], True) for s, (n, token) in enumerate(places)])
            last = [int(token) for token in self._context.logits(len(last)).argmax(axis=1)]
            for answer, token in zip(found, last, strict=True):
                answer.append(token)
        return found

    def close(self) -> None:
        self._context.close()

    def _timed(self, rows: list[Row]) -> float:
        started_s = time.perf_counter()
        self._context.decode(rows)
        return time.perf_counter() - started_s


def num_threads() -> int:
    """All cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
