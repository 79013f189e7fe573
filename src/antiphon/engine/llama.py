"""LlamaRunner: one `llama_decode` call a step, on llama-cpp-python's low-level API.

The only file that knows llama.cpp's contexts and batches. Every open sequence has a KV stream of its
own (`kv_unified` off: docs/adr/0001), so steps do not scan other sequences' cells; blocks are shared
by copying them between streams through the sequence-state blob (kvstate.py), bookkeeping in
streams.py.

A step's rows are handed over in the order of their streams: llama.cpp runs neighbouring streams in
one piece and cuts where a number is missing. A short gap is therefore filled with a throw-away token.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
import numpy as np

from antiphon.core.clock import Clock
from antiphon.core.errors import EngineFault
from antiphon.engine.kvstate import BlockCut, Bytes, KvLayout, UnknownLayout
from antiphon.engine.llamabatch import Batch, Row
from antiphon.engine.runner import Chunk, Logits, RunnerFault
from antiphon.engine.streams import NOTHING, Stream, Streams
from antiphon.engine.threads import ThreadGovernor, fastest

_GGML_LOG_ERROR = 4
_MAX_GAP = 3  # streams; a longer gap is cheaper to run around
_MAX_PAYLOAD_BYTES = 4 * 2**20  # Redis peaks near values of 4 MB (docs/adr/0001)
_MICRO_BATCH_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSettings:
    """How a model is run. `context_tokens` is per sequence; `thread_counts` (ascending) are those allowed."""

    path: Path
    context_tokens: int
    max_sequences: int
    max_step_tokens: int
    thread_counts: tuple[int, ...]


class LlamaRunner:
    """Implements `ModelRunner`. Single-threaded apart from llama.cpp's own threads."""

    def __init__(self, settings: LlamaSettings, clock: Clock) -> None:
        llama_cpp.llama_log_set(_LOG, None)
        llama_cpp.llama_backend_init()
        self._clock = clock
        self._model = _load(settings.path)
        self._context = _context(self._model, settings)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._threads = settings.thread_counts[-1]
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.vocab_size: int = llama_cpp.llama_vocab_n_tokens(vocab)
        self.context_tokens = settings.context_tokens
        self.max_sequences = settings.max_sequences
        self._batch = Batch(settings.max_step_tokens + settings.max_sequences)
        self._streams = Streams(settings.max_sequences)
        self.block_tokens = 16
        start = fastest(settings.thread_counts, self._measure)
        self._governor = ThreadGovernor(settings.thread_counts, start)
        self._layout = self._learn_layout()
        self.shares_blocks = self._layout is not None and self._copies_are_exact(self._layout)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV a token takes; 0 where the layout is unknown."""
        return self._layout.bytes_per_token if self._layout else 0

    def close_model(self) -> None:
        """Free the context and the weights. The runner is of no use afterwards."""
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def open(self, sequence: int, blocks: list[int]) -> None:
        stream = self._streams.choose(blocks)
        num_matching = stream.num_matching(blocks)
        in_place = num_matching == len(blocks)
        self._save(stream, self._streams.unsaved(stream, num_matching if in_place else 0))
        if in_place:
            self._truncate(stream, num_matching * self.block_tokens)
        else:
            self._restore(stream, [self._payload(block) for block in blocks])
        self._streams.occupy(stream, sequence, blocks, self.block_tokens)

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
        self._use_threads(self._governor.threads_for(num_decode, num_prefill))
        started = self._clock.now()
        status = self._batch.decode(self._context, rows)
        self._governor.observe(num_decode, num_prefill, self._clock.now() - started)
        for stream in fillers:
            self._truncate(stream, stream.num_cells)
        if status != 0:
            for stream, _ in placed:
                self._truncate(stream, stream.num_cells)
            raise RunnerFault(f"llama.cpp could not compute the step (status {status})")
        for stream, i in placed:
            stream.num_cells = chunks[i].start + len(chunks[i].tokens)
        return self._logits([i for _, i in placed if chunks[i].wants_logits])

    def keep(self, sequence: int, index: int, block: int) -> None:
        self._streams.set(self._streams.of(sequence), index, block)

    def close(self, sequence: int) -> None:
        self._streams.vacate(sequence)

    def drop(self, block: int) -> None:
        self._streams.drop(block)

    def export_block(self, block: int) -> bytes:
        return self._payload(block)

    def import_block(self, block: int, payload: bytes) -> None:
        assert self._layout is not None
        if len(payload) != self.block_tokens * self._layout.bytes_per_token:
            raise ValueError(f"a payload of {len(payload)} bytes does not fit this model")
        self._streams.saved[block] = payload

    def _fillers(self, used: list[Stream]) -> list[Stream]:
        """Streams in the short gaps between the used ones, as far as they have room for one token."""
        fillers: list[Stream] = []
        for left, right in itertools.pairwise(used):
            gap = self._streams.all[left.index + 1 : right.index]
            if 0 < len(gap) <= _MAX_GAP and all(s.num_cells < self.context_tokens for s in gap):
                fillers += gap
        return fillers

    def _use_threads(self, count: int) -> None:
        if count != self._threads:
            self._threads = count
            llama_cpp.llama_set_n_threads(self._context, count, count)

    def _measure(self, threads: int) -> float:
        """Seconds of a short prefill and some decodes with this many threads."""
        self._use_threads(threads)
        started = self._clock.now()
        self._batch.decode(self._context, [Row(0, 0, [1] * 16, False)])
        for position in range(16, 20):
            self._batch.decode(self._context, [Row(0, position, [1], True)])
        seconds = self._clock.now() - started
        self._truncate(self._streams.all[0], 0)
        return seconds

    def _logits(self, order: list[int]) -> Logits:
        """Rows in chunk order; `order[r]` is the chunk whose logits llama.cpp put in row r."""
        if not order:
            return np.empty((0, self.vocab_size), np.float32)
        pointer = llama_cpp.llama_get_logits(self._context)
        rows = np.ctypeslib.as_array(pointer, shape=(len(order), self.vocab_size))
        by_chunk = np.argsort(order)
        return rows if np.array_equal(by_chunk, np.arange(len(order))) else rows[by_chunk]

    def _payload(self, block: int) -> bytes:
        payload = self._streams.saved.get(block)
        if payload is None:
            holder = self._streams.holder(block)
            if holder is None:
                raise RunnerFault(f"block {block} is not held")
            # The neighbours will be wanted too, and a stream can only be read as a whole.
            self._save(holder, [b for b in holder.blocks if b != NOTHING and b not in self._streams.saved])
            payload = self._streams.saved[block]
        return payload

    def _save(self, stream: Stream, blocks: list[int]) -> None:
        if not blocks:
            return
        assert self._layout is not None
        blob = self._state(stream)
        cut = BlockCut(self.block_tokens, [stream.blocks.index(block) for block in blocks])
        payloads = self._layout.split(blob, stream.num_cells, stream.index, cut)
        self._streams.saved.update(zip(blocks, payloads, strict=True))

    def _state(self, stream: Stream) -> Bytes:
        size = llama_cpp.llama_state_seq_get_size_ext(self._context, stream.index, 0)
        blob = np.empty(size, np.uint8)
        written = llama_cpp.llama_state_seq_get_data_ext(self._context, _pointer(blob), size, stream.index, 0)
        if written != size:
            raise RunnerFault("llama.cpp could not export a sequence's KV")
        return blob

    def _restore(self, stream: Stream, payloads: list[bytes]) -> None:
        assert self._layout is not None
        blob = self._layout.join(payloads, stream.index, self.block_tokens)
        self._truncate(stream, 0)
        read = llama_cpp.llama_state_seq_set_data_ext(
            self._context, _pointer(blob), len(blob), stream.index, 0
        )
        if read != len(blob):
            raise RunnerFault("llama.cpp refused the KV of a prefix")

    def _truncate(self, stream: Stream, num_cells: int) -> None:
        if not llama_cpp.llama_memory_seq_rm(self._memory, stream.index, num_cells, -1):
            llama_cpp.llama_memory_seq_rm(self._memory, stream.index, -1, -1)
            raise RunnerFault("llama.cpp could not shorten a sequence")

    def _learn_layout(self) -> KvLayout | None:
        """Read the KV layout off a sample and set the block size; None where it is unknown to us."""
        sample = Stream(0, num_cells=self.block_tokens)
        row = Row(0, 0, [i % self.vocab_size for i in range(100, 100 + self.block_tokens)], False)
        if self._batch.decode(self._context, [row]) != 0:
            raise EngineFault("The model could not compute its first tokens.")
        try:
            layout = KvLayout.learn(self._state(sample).tobytes(), self.block_tokens, self.max_sequences)
        except UnknownLayout:
            return None
        finally:
            self._truncate(sample, 0)
        if 2 * self.block_tokens * layout.bytes_per_token <= _MAX_PAYLOAD_BYTES:
            self.block_tokens *= 2
        return layout

    def _copies_are_exact(self, layout: KvLayout) -> bool:
        """Self-test: two blocks exported and joined again must give the very same next logits."""
        tokens = [(7 * i + 11) % self.vocab_size for i in range(2 * self.block_tokens + 1)]
        first, last = self._streams.all[0], self._streams.all[-1]
        length = len(tokens) - 1
        decode = self._batch.decode
        decode(self._context, [Row(first.index, 0, tokens[:length], False)])
        blob = self._state(first)
        payloads = layout.split(blob, length, first.index, BlockCut(self.block_tokens, [0, 1]))
        decode(self._context, [Row(first.index, length, tokens[length:], True)])
        expected = self._logits([0]).copy()
        self._truncate(first, 0)
        self._restore(last, payloads)
        decode(self._context, [Row(last.index, length, tokens[length:], True)])
        is_exact = np.array_equal(expected, self._logits([0]))
        self._truncate(last, 0)
        return is_exact


def _log(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    """llama.cpp's own words: errors are worth a line, the rest is not."""
    if level == _GGML_LOG_ERROR:
        logging.getLogger("llama.cpp").error(text.decode(errors="replace").strip())


_LOG = llama_cpp.llama_log_callback(_log)  # C keeps the pointer: it must live as long as the process


def _pointer(data: Bytes) -> ctypes._Pointer[ctypes.c_uint8]:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _load(path: Path) -> int:
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise EngineFault(
            f"llama.cpp could not load {path.name}: not a GGUF model it knows, or too little memory."
        )
    return int(model)


def _context(model: int, settings: LlamaSettings) -> int:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = settings.context_tokens * settings.max_sequences
    params.n_seq_max = settings.max_sequences
    params.kv_unified = False
    params.n_batch = settings.max_step_tokens + settings.max_sequences
    params.n_ubatch = min(_MICRO_BATCH_TOKENS, params.n_batch)
    params.n_threads = params.n_threads_batch = settings.thread_counts[-1]
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.no_perf = True
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise EngineFault(
            f"No memory for {settings.max_sequences} sequences of {settings.context_tokens} tokens: "
            "lower --max-sequences or --context."
        )
    return int(context)
