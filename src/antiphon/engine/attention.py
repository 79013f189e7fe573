"""With or without flash attention: measured, because CPUs differ by several times either way.

llama.cpp's fused CPU kernel is fast for long chunks of one sequence and on some CPUs slow for the
short ones that batches of chats are made of (docs/adr/0001). So two small contexts over the loaded
model are timed on such a batch before the real one is made. Their KV is filled with zeros instead of
computed tokens: the arithmetic is the same, and a large model is measured in a few steps.

The threads are as many as are fastest just now: with too many beside a busy neighbour these very
steps would take minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from antiphon.core.clock import Clock
from antiphon.engine.kvstate import KvLayout, UnknownLayout
from antiphon.engine.llamabatch import Row
from antiphon.engine.llamacontext import ContextShape, LlamaContext
from antiphon.engine.threads import fastest

_STREAMS, _HELD_TOKENS, _CHUNK_TOKENS, _BLOCK_TOKENS = 4, 256, 16, 32
_ROUNDS = 3

# The work the choice is judged by: per chunk of a prompt computed, this many tokens are answered.
_DECODES_PER_CHUNK = 10


def prefers_flash_attention(model: int, thread_counts: Sequence[int], clock: Clock) -> bool:
    """Whether batches of chats step faster with it on this machine. True where that cannot be tried.

    `thread_counts`, ascending, are those a step may use.
    """
    contexts: dict[bool, LlamaContext] = {}
    try:
        for flash in (True, False):
            contexts[flash] = LlamaContext(
                model,
                ContextShape(
                    num_streams=_STREAMS,
                    stream_tokens=2 * _HELD_TOKENS,
                    step_tokens=_STREAMS * _BLOCK_TOKENS,
                    threads=thread_counts[0],
                    flash_attention=flash,
                ),
            )
            _fill(contexts[flash])
        threads = _fastest_threads(contexts[True], thread_counts, clock)
        for context in contexts.values():
            context.use_threads(threads)
        costs = {flash: float("inf") for flash in contexts}
        for _ in range(_ROUNDS):
            for flash, context in contexts.items():
                costs[flash] = min(costs[flash], _cost_s(context, clock))
        return costs[True] <= costs[False]
    except UnknownLayout:
        return True
    finally:
        for context in contexts.values():
            context.close()


def _fill(context: LlamaContext) -> None:
    """Let every stream hold `_HELD_TOKENS` positions without computing them."""
    context.decode([Row(0, 0, [1] * _BLOCK_TOKENS, False)])
    layout = KvLayout.learn(context.read(0).tobytes(), _BLOCK_TOKENS, _STREAMS)
    payload = bytes(_BLOCK_TOKENS * layout.bytes_per_token)
    for stream in range(_STREAMS):
        context.write(stream, layout.join([payload] * (_HELD_TOKENS // _BLOCK_TOKENS), stream, _BLOCK_TOKENS))


def _fastest_threads(context: LlamaContext, counts: Sequence[int], clock: Clock) -> int:
    """How many of these threads decode fastest."""

    def decode_s(count: int) -> float:
        context.use_threads(count)
        return _step_s(context, 1, clock.now)

    return fastest(counts, decode_s, rounds=_ROUNDS)[0] if len(counts) > 1 else counts[0]


def _cost_s(context: LlamaContext, clock: Clock) -> float:
    """Seconds of the work above, from one step of each kind."""
    decode_s = _step_s(context, 1, clock.now)
    chunk_s = _step_s(context, _CHUNK_TOKENS, clock.now)
    return chunk_s + _DECODES_PER_CHUNK * decode_s


def _step_s(context: LlamaContext, num_tokens: int, now: Callable[[], float]) -> float:
    tokens = np.arange(1, num_tokens + 1).tolist()
    started = now()
    context.decode([Row(stream, _HELD_TOKENS, tokens, True) for stream in range(_STREAMS)])
    seconds = now() - started
    for stream in range(_STREAMS):
        context.truncate(stream, _HELD_TOKENS)
    return seconds
