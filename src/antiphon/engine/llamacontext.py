"""One llama.cpp context: decode rows, read and write sequences' KV, set threads.

A thin object over llama-cpp-python's low-level API, so that the runner speaks of streams and rows
only. KV streams are separate (docs/adr/0001). Owns the context, not the model. Single-threaded.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
import numpy as np

from antiphon.core.errors import EngineFault
from antiphon.engine.kvstate import Bytes
from antiphon.engine.kvtype import KvType
from antiphon.engine.llamabatch import Batch, Row
from antiphon.engine.runner import Logits, RunnerFault

_GGML_LOG_ERROR = 4
_MICRO_BATCH_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextShape:
    """Size and manner of a context. `stream_tokens` is what each of the streams holds."""

    num_streams: int
    stream_tokens: int
    step_tokens: int
    threads: int
    flash_attention: bool
    kv_type: KvType = KvType.F16


class LlamaContext:
    """A context over a loaded model."""

    def __init__(self, model: int, shape: ContextShape) -> None:
        self.shape = shape
        self._context = _make(model, shape)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = Batch(shape.step_tokens)
        self._threads = shape.threads
        self._vocab_size = vocab_size(model)

    def close(self) -> None:
        """Free it. Nothing may be called afterwards."""
        llama_cpp.llama_free(self._context)

    def use_threads(self, count: int) -> None:
        """Steps from now on run on this many threads."""
        if count != self._threads:
            self._threads = count
            llama_cpp.llama_set_n_threads(self._context, count, count)

    def decode(self, rows: list[Row]) -> None:
        """Run one step. Raises RunnerFault; what the streams hold of it is then undefined."""
        status = self._batch.decode(self._context, rows)
        if status != 0:
            raise RunnerFault(f"llama.cpp could not compute the step (status {status})")

    def logits(self, num_rows: int) -> Logits:
        """The rows that wanted logits in the last step, in its order. Valid until the next one."""
        if num_rows == 0:
            return np.empty((0, self._vocab_size), np.float32)
        pointer = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, shape=(num_rows, self._vocab_size))

    def truncate(self, stream: int, num_cells: int) -> None:
        """Keep the first `num_cells` positions of a stream."""
        if not llama_cpp.llama_memory_seq_rm(self._memory, stream, num_cells, -1):
            llama_cpp.llama_memory_seq_rm(self._memory, stream, -1, -1)
            raise RunnerFault("llama.cpp could not shorten a sequence")

    def read(self, stream: int) -> Bytes:
        """All KV of a stream as llama.cpp's blob."""
        size = llama_cpp.llama_state_seq_get_size_ext(self._context, stream, 0)
        blob = np.empty(size, np.uint8)
        if llama_cpp.llama_state_seq_get_data_ext(self._context, _pointer(blob), size, stream, 0) != size:
            raise RunnerFault("llama.cpp could not export a sequence's KV")
        return blob

    def write(self, stream: int, blob: Bytes) -> None:
        """Make a stream hold what the blob says, and nothing else."""
        self.truncate(stream, 0)
        if llama_cpp.llama_state_seq_set_data_ext(self._context, _pointer(blob), len(blob), stream, 0) != len(
            blob
        ):
            raise RunnerFault("llama.cpp refused the KV of a sequence")


def load_model(path: Path) -> int:
    """Load a model file. Raises EngineFault."""
    llama_cpp.llama_log_set(_LOG, None)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise EngineFault(
            f"llama.cpp could not load {path.name}: not a GGUF model it knows, or too little memory."
        )
    return int(model)


def free_model(model: int) -> None:
    """Free a model whose contexts are closed."""
    llama_cpp.llama_model_free(model)


def vocab_size(model: int) -> int:
    """Number of token ids of a model."""
    return int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))


def _make(model: int, shape: ContextShape) -> int:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = shape.stream_tokens * shape.num_streams
    params.n_seq_max = shape.num_streams
    params.kv_unified = False
    params.n_batch = shape.step_tokens
    params.n_ubatch = min(_MICRO_BATCH_TOKENS, shape.step_tokens)
    params.n_threads = params.n_threads_batch = shape.threads
    params.flash_attn_type = (
        llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        if shape.flash_attention
        else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    params.type_k = params.type_v = shape.kv_type.ggml
    params.no_perf = True
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise EngineFault(
            f"No memory for {shape.num_streams} sequences of {shape.stream_tokens} tokens: "
            "lower --max-sequences or --context."
        )
    return int(context)


def _log(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    """llama.cpp's own words: errors are worth a line, the rest is not."""
    if level == _GGML_LOG_ERROR:
        logging.getLogger("llama.cpp").error(text.decode(errors="replace").strip())


_LOG = llama_cpp.llama_log_callback(_log)  # C keeps the pointer: it must live as long as the process


def _pointer(data: Bytes) -> ctypes._Pointer[ctypes.c_uint8]:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
