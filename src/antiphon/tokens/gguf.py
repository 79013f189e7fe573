"""A model file's own vocabulary, through llama.cpp.

Owns one llama.cpp model loaded with its vocabulary only (no weights), from construction to
`close`. Every piece is read once at load, so that decoding never enters C again. Spellings of
control tokens in a text are encoded as plain text; tokens which the file marks as user-defined
(`<think>` in some models) are ordinary text to llama.cpp and come from user text as well.

Does not look for files (`modelfile`), render chats (`template`) or add a BOS (`prompt`).
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import llama_cpp

from antiphon.core.errors import BadRequest
from antiphon.tokens.bytelevel import utf8

_log = logging.getLogger("llama.cpp")

_MAX_PIECE_BYTES = 4096
_KEPT_BUFFER_TOKENS = 1 << 18  # a longer text gets a buffer of its own
_SPARE_TOKENS = 8  # a vocabulary may put a space before a text, no text has more tokens than bytes
_LOG_ERROR = 4  # of enum ggml_log_level
_CONTROL_ATTRS = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN


def _log_message(level: int, text: bytes, _user_data: object) -> None:
    """llama.cpp's own words: errors are worth a line, the rest is not."""
    if level == _LOG_ERROR:
        _log.error(text.decode("utf-8", errors="replace").strip())


# llama.cpp keeps the pointer: the callback must live as long as the process does.
_LOG_CALLBACK = llama_cpp.llama_log_callback(_log_message)


class GgufTokenizer:
    """Tokenizer of a GGUF file. One thread at a time. `close` frees the vocabulary."""

    def __init__(self, path: Path) -> None:
        llama_cpp.llama_log_set(_LOG_CALLBACK, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise BadRequest(f"{path.name}: llama.cpp cannot read this file's vocabulary.")
        self._model: llama_cpp.llama_model_p | None = model
        vocab = llama_cpp.llama_model_get_vocab(model)
        assert vocab is not None, "a loaded model has a vocabulary"
        self._vocab = vocab
        self._pieces, self._special = _read_vocabulary(vocab)
        self._names = {token_id: spelling for spelling, token_id in self._special.items()}
        bos = llama_cpp.llama_vocab_bos(vocab)
        self._bos_id = bos if llama_cpp.llama_vocab_get_add_bos(vocab) and bos >= 0 else None
        self._end_ids = tuple(
            token_id for token_id in range(self.vocab_size) if llama_cpp.llama_vocab_is_eog(vocab, token_id)
        )
        self._buffer = (ctypes.c_int32 * 4096)()

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    @property
    def bos_id(self) -> int | None:
        return self._bos_id

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self._end_ids

    @property
    def special_tokens(self) -> dict[str, int]:
        return dict(self._special)

    def encode(self, text: str) -> list[int]:
        if self._model is None:
            raise RuntimeError("encode on a closed tokenizer")
        data = utf8(text)
        needed = len(data) + _SPARE_TOKENS
        if needed > 2**31 - 1:
            raise BadRequest("The text is longer than 2 GiB.")
        buffer = self._buffer
        if needed > len(buffer):
            buffer = (ctypes.c_int32 * needed)()
            if needed <= _KEPT_BUFFER_TOKENS:
                self._buffer = buffer
        # The length goes along, so that NUL characters are text like any other.
        count = llama_cpp.llama_tokenize(self._vocab, data, len(data), buffer, len(buffer), False, False)
        if count < 0:
            raise RuntimeError(f"llama.cpp wants {-count} tokens for {len(data)} bytes")
        return buffer[:count]

    def piece(self, token_id: int) -> bytes:
        if not 0 <= token_id < len(self._pieces):
            raise IndexError(f"token {token_id} is outside the vocabulary of {len(self._pieces)}")
        return self._pieces[token_id]

    def name(self, token_id: int) -> str:
        piece = self.piece(token_id)
        return self._names.get(token_id) or piece.decode("utf-8", errors="replace")

    def close(self) -> None:
        """Free the vocabulary. Safe to call twice; nothing can be encoded afterwards."""
        model, self._model = self._model, None
        if model is not None:
            llama_cpp.llama_model_free(model)


def _read_vocabulary(vocab: llama_cpp.llama_vocab_p) -> tuple[list[bytes], dict[str, int]]:
    """All pieces by id, and the control tokens by spelling. About 3 µs a token."""
    buffer = ctypes.create_string_buffer(_MAX_PIECE_BYTES)
    view = memoryview(buffer)
    pieces: list[bytes] = []
    special: dict[str, int] = {}
    for token_id in range(llama_cpp.llama_vocab_n_tokens(vocab)):
        if int(llama_cpp.llama_vocab_get_attr(vocab, token_id)) & _CONTROL_ATTRS:
            spelling = llama_cpp.llama_vocab_get_text(vocab, token_id).decode("utf-8", errors="replace")
            if spelling:
                special.setdefault(spelling, token_id)
            pieces.append(b"")
            continue
        size = llama_cpp.llama_token_to_piece(vocab, token_id, buffer, _MAX_PIECE_BYTES, 0, False)
        if size < 0:
            raise BadRequest(f"token {token_id} of the vocabulary is longer than {_MAX_PIECE_BYTES} bytes")
        pieces.append(bytes(view[:size]))
    return pieces, special
