"""A `llama_batch` over numpy arrays, filled by slices instead of element by element."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import llama_cpp
import numpy as np


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive tokens of one stream."""

    stream: int
    start: int
    tokens: list[int]
    wants_logits: bool


class Batch:
    """Reusable memory for one step of at most `capacity` tokens."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity, np.int32)
        self._num_sequences = np.ones(capacity, np.int32)
        self._streams = np.zeros(capacity, np.int32)
        self._logits = np.zeros(capacity, np.int8)
        # seq_id is an array of pointers, one into `_streams` per token.
        self._stream_pointers = self._streams.ctypes.data + 4 * np.arange(capacity, dtype=np.uint64)
        int32, int8 = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_int8)
        self._batch = llama_cpp.llama_batch(
            0,
            self._tokens.ctypes.data_as(int32),
            None,
            self._positions.ctypes.data_as(int32),
            self._num_sequences.ctypes.data_as(int32),
            self._stream_pointers.ctypes.data_as(ctypes.POINTER(int32)),
            self._logits.ctypes.data_as(int8),
        )

    def decode(self, context: int, rows: list[Row]) -> int:
        """Run the rows. Returns llama.cpp's status, 0 for success."""
        at = 0
        for row in rows:
            end = at + len(row.tokens)
            if end > self._capacity:
                raise ValueError(f"a step of more than {self._capacity} tokens")
            self._tokens[at:end] = row.tokens
            self._positions[at:end] = np.arange(row.start, row.start + len(row.tokens))
            self._streams[at:end] = row.stream
            self._logits[at:end] = 0
            self._logits[end - 1] = row.wants_logits
            at = end
        self._batch.n_tokens = at
        status = int(llama_cpp.llama_decode(context, self._batch))
        llama_cpp.llama_synchronize(context)
        return status
