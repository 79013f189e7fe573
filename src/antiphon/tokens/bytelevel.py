"""A vocabulary with one token a byte, for models that only follow a script.

Owns no file and no state: ids 0 … 255 are the bytes, 256 and 257 the ChatML control tokens. Text of
any language comes apart and together again exactly, and emoji split over four tokens, which is what
tests of streams want. Real models bring their own vocabulary (`gguf.GgufTokenizer`).
"""

from __future__ import annotations

from antiphon.core.errors import BadRequest

IM_START = 256
IM_END = 257

_CONTROL = {"<|im_start|>": IM_START, "<|im_end|>": IM_END}
_NAMES = {token_id: spelling for spelling, token_id in _CONTROL.items()}
_VOCAB_SIZE = 258


class ByteTokenizer:
    """Tokenizer for scripted models. Safe to use from any thread."""

    @property
    def vocab_size(self) -> int:
        return _VOCAB_SIZE

    @property
    def bos_id(self) -> int | None:
        return None

    @property
    def end_ids(self) -> tuple[int, ...]:
        return (IM_END,)

    @property
    def special_tokens(self) -> dict[str, int]:
        return dict(_CONTROL)

    def encode(self, text: str) -> list[int]:
        return list(utf8(text))

    def piece(self, token_id: int) -> bytes:
        if not 0 <= token_id < _VOCAB_SIZE:
            raise IndexError(f"token {token_id} is outside the vocabulary of {_VOCAB_SIZE}")
        return b"" if token_id in _NAMES else bytes((token_id,))

    def name(self, token_id: int) -> str:
        piece = self.piece(token_id)
        return _NAMES.get(token_id) or piece.decode("utf-8", errors="replace")


def utf8(text: str) -> bytes:
    """The text as UTF-8. Raises BadRequest where it holds half a surrogate pair."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"The text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}; "
            "send whole characters."
        ) from error
