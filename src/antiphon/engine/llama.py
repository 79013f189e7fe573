"""LlamaRunner: one `llama_decode` call a step.

Every open sequence has a KV stream of its
own (`kv_unified` off: docs/adr/0001), so steps do not scan other sequences' cells; blocks are shared
by copying them between streams through the sequence-state blob (kvstate.py), bookkeeping in
streams.py.

A step's rows are handed over in the order of their streams: llama.cpp runs neighbouring streams in
one piece and cuts where a number is missing. A short gap is therefore filled with a throw-away token.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from antiphon.core.clock import Clock
from antiphon.engine.attention import prefers_flash_attention
from antiphon.engine.kvstate import BlockCut, KvLayout, Payload, UnknownLayout
from antiphon.engine.kvtype import KvType
from antiphon.engine.llamabatch import Row
from antiphon.engine.llamacontext import ContextShape, LlamaContext, free_model, load_model, vocab_size
from antiphon.engine.llamafacts import describe_kv
from antiphon.engine.runner import Chunk, Logits, RunnerFault
from antiphon.engine.streams import Stream, Streams
from antiphon.engine.threads import ThreadGovernor, fastest

_SHORT_PREFILL = 16  # tokens of the prefill that is measured at start
_MEASURED_DECODES = 5  # with each thread count, then
_MAX_GAP = 3  # streams; a longer gap is cheaper to run around
_MAX_PAYLOAD_BYTES = 4 * 2**20  # Redis peaks near values of 4 MB (docs/adr/0001)
_SPARE_BYTES = 128 * 2**20  # payloads of blocks that lie in a stream too: a long shared prefix fits


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSettings:
    """How a model is run. `context_tokens` is per sequence; `thread_counts` (ascending) are those allowed."""

    path: Path
    context_tokens: int
    max_sequences: int
    max_step_tokens: int
    thread_counts: tuple[int, ...]
    kv_type: KvType = KvType.F16


class LlamaRunner:
    """Implements `ModelRunner`. Single-threaded apart from llama.cpp's own threads."""

    def __init__(self, settings: LlamaSettings, clock: Clock) -> None:
        self._clock = clock
        self._model = load_model(settings.path)
        self.vocab_size = vocab_size(self._model)
        self.context_tokens = settings.context_tokens
        self.max_sequences = settings.max_sequences
        self._kv_type = settings.kv_type
        self.flash_attention = settings.kv_type.is_quantised or prefers_flash_attention(
            self._model, settings.thread_counts, clock
        )
        self._context = LlamaContext(
            self._model,
            ContextShape(
                num_streams=settings.max_sequences,
                stream_tokens=settings.context_tokens,
                step_tokens=settings.max_step_tokens + settings.max_sequences,
                threads=settings.thread_counts[0],
                flash_attention=self.flash_attention,
                kv_type=settings.kv_type,
            ),
        )
        self.kv_description = describe_kv(self._model, settings.kv_type, settings.context_tokens, os.environ)
        self._context.decode([Row(0, 0, [1] * _SHORT_PREFILL, False)])
        start, decode_s = fastest(settings.thread_counts, self._decode_s, rounds=_MEASURED_DECODES)
        prefill_s = self._measure_prefill(start)
        self.start_prefill_tokens_per_s = _SHORT_PREFILL / prefill_s
        measured = ((1, decode_s), (_SHORT_PREFILL, prefill_s))
        self._governor = ThreadGovernor(settings.thread_counts, start, measured)
        self.block_tokens = 16
        self._layout = self._learn_layout()
        num_spare = _SPARE_BYTES // self.block_bytes if self.block_bytes else 0
        self._streams = Streams(settings.max_sequences, num_spare)
        self.shares_blocks = self._layout is not None and self._copies_are_exact(self._layout)

    @property
    def block_bytes(self) -> int:
        """Bytes of an exported block; 0 where the layout is unknown."""
        return self.block_tokens * self._layout.bytes_per_token if self._layout else 0

    def close_model(self) -> None:
        """Free the context and the weights. The runner is of no use afterwards."""
        self._context.close()
        free_model(self._model)

    def open(self, sequence: int, blocks: list[int]) -> float:
        stream = self._streams.choose(blocks)
        num_matching = stream.num_matching(blocks)
        in_place = num_matching == len(blocks)
        copying_s = 0.0
        self._save(self._read(stream, self._streams.unsaved(stream, num_matching if in_place else 0)))
        if in_place:
            self._context.truncate(stream.index, num_matching * self.block_tokens)
        else:
            payloads = self._payloads(blocks)
            self._save(payloads)  # whoever shares them comes soon, if at all
            started = self._clock.now()
            self._restore(stream, [payloads[block] for block in blocks])
            copying_s = self._clock.now() - started
        self._streams.occupy(stream, sequence, blocks, self.block_tokens)
        self._streams.trim()
        return copying_s

    def run(self, chunks: list[Chunk]) -> Logits:
        placed = sorted(
            ((self._streams.of(chunk.sequence), i) for i, chunk in enumerate(chunks)),
            key=lambda p: p[0].index,
        )
        fillers = self._fillers([stream for stream, _ in placed])
        rows = [
            Row(stream.index, chunks[i].start, chunks[i].tokens, chunks[i].wants_logits)
            for stream, i in placed
        ]
        rows += [Row(stream.index, stream.num_cells, [0], False) for stream in fillers]
        rows.sort(key=lambda row: row.stream)
        num_decode = sum(1 for chunk in chunks if len(chunk.tokens) == 1)
        num_prefill = sum(len(chunk.tokens) for chunk in chunks) - num_decode
        self._context.use_threads(self._governor.threads_for(num_decode, num_prefill))
        started = self._clock.now()
        try:
            self._context.decode(rows)
        except RunnerFault:
            for stream, _ in placed:
                self._context.truncate(stream.index, stream.num_cells)
            raise
        finally:
            for stream in fillers:
                self._context.truncate(stream.index, stream.num_cells)
        self._governor.observe(num_decode, num_prefill, self._clock.now() - started)
        for stream, i in placed:
            stream.num_cells = chunks[i].start + len(chunks[i].tokens)
        return self._logits([i for _, i in placed if chunks[i].wants_logits])

    def keep(self, sequence: int, index: int, block: int) -> None:
        self._streams.set(self._streams.of(sequence), index, block)

    def close(self, sequence: int) -> None:
        self._streams.vacate(sequence)

    def drop(self, block: int) -> None:
        self._streams.drop(block)

    def export_blocks(self, blocks: list[int]) -> list[bytes]:
        payloads = self._payloads(blocks)
        return [bytes(payloads[block]) for block in blocks]

    def import_block(self, block: int, payload: bytes | memoryview) -> None:
        assert self._layout is not None
        if len(payload) != self.block_tokens * self._layout.bytes_per_token:
            raise ValueError(f"a payload of {len(payload)} bytes does not fit this model")
        # A view of bytes stays as it is; memory that its owner may use again has to be copied.
        is_fixed = isinstance(payload, bytes) or isinstance(payload.obj, bytes)
        self._streams.save(block, payload if is_fixed else bytes(payload))

    def _fillers(self, used: list[Stream]) -> list[Stream]:
        """Streams in the short gaps between the used ones, as far as they have room for one token."""
        fillers: list[Stream] = []
        for left, right in itertools.pairwise(used):
            gap = self._streams.all[left.index + 1 : right.index]
            if 0 < len(gap) <= _MAX_GAP and all(s.num_cells < self.context_tokens for s in gap):
                fillers += gap
        return fillers

    def _decode_s(self, threads: int) -> float:
        """Seconds of a decode with this many threads, after the short prefill."""
        self._context.use_threads(threads)
        started = self._clock.now()
        self._context.decode([Row(0, _SHORT_PREFILL, [1], True)])
        seconds = self._clock.now() - started
        self._context.truncate(0, _SHORT_PREFILL)
        return seconds

    def _measure_prefill(self, threads: int) -> float:
        """Seconds of the short prefill: the least of some. Stream 0 is empty afterwards."""
        self._context.use_threads(threads)
        self._context.truncate(0, 0)
        seconds: list[float] = []
        for _ in range(3):
            started = self._clock.now()
            self._context.decode([Row(0, 0, [1] * _SHORT_PREFILL, False)])
            seconds.append(self._clock.now() - started)
            self._context.truncate(0, 0)
        return min(seconds)

    def _logits(self, order: list[int]) -> Logits:
        """Rows in chunk order; `order[r]` is the chunk whose logits llama.cpp put in row r."""
        rows = self._context.logits(len(order))
        by_chunk = np.argsort(order)
        return rows if np.array_equal(by_chunk, np.arange(len(order))) else rows[by_chunk]

    def _payloads(self, blocks: list[int]) -> dict[int, Payload]:
        """The payload of each of these blocks. Reading a stream costs all of it: as few reads as possible."""
        found = {block: payload for block in blocks if (payload := self._streams.payload(block)) is not None}
        missing = set(blocks) - found.keys()
        while missing:
            stream = self._streams.holder(missing)
            if stream is None:
                raise RunnerFault(f"block {missing.pop()} is not held")
            found |= self._read(stream, [block for block in stream.blocks if block in missing])
            missing -= found.keys()
        return found

    def _read(self, stream: Stream, blocks: list[int]) -> dict[int, Payload]:
        """Copy these blocks out of a stream that holds them."""
        if not blocks:
            return {}
        assert self._layout is not None
        blob = self._context.read(stream.index)
        cut = BlockCut(self.block_tokens, [stream.blocks.index(block) for block in blocks])
        payloads = self._layout.split(blob, stream.num_cells, stream.index, cut)
        return dict(zip(blocks, payloads, strict=True))

    def _save(self, payloads: Mapping[int, Payload]) -> None:
        for block, payload in payloads.items():
            self._streams.save(block, payload)

    def _restore(self, stream: Stream, payloads: list[Payload]) -> None:
        assert self._layout is not None
        self._context.write(stream.index, self._layout.join(payloads, stream.index, self.block_tokens))

    def _learn_layout(self) -> KvLayout | None:
        """Read the KV layout off a sample and set the block size; None where it is unknown to us.

        The block size is that of f16 whatever the format is: it depends on the model alone.
        """
        tokens = [i % self.vocab_size for i in range(100, 100 + self.block_tokens)]
        self._context.decode([Row(0, 0, tokens, False)])
        try:
            layout = KvLayout.learn(self._context.read(0).tobytes(), self.block_tokens, self.max_sequences)
        except UnknownLayout:
            return None
        finally:
            self._context.truncate(0, 0)
        num_values = sum(self._kv_type.num_values(row) for row in layout.row_bytes)
        if 2 * self.block_tokens * 2 * layout.num_layers * num_values <= _MAX_PAYLOAD_BYTES:
            self.block_tokens *= 2
        return layout

    def _copies_are_exact(self, layout: KvLayout) -> bool:
        """Self-test: two blocks exported and joined again must give the very same next logits."""
        tokens = [(7 * i + 11) % self.vocab_size for i in range(2 * self.block_tokens + 1)]
        first, last = 0, self.max_sequences - 1
        length = len(tokens) - 1
        context = self._context
        context.decode([Row(first, 0, tokens[:length], False)])
        payloads = layout.split(context.read(first), length, first, BlockCut(self.block_tokens, [0, 1]))
        context.decode([Row(first, length, tokens[length:], True)])
        expected = context.logits(1).copy()
        context.truncate(first, 0)
        context.write(last, layout.join(payloads, last, self.block_tokens))
        context.decode([Row(last, length, tokens[length:], True)])
        is_exact = np.array_equal(expected, context.logits(1))
        context.truncate(last, 0)
        return is_exact
