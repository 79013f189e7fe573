"""The `Tokenizer` seam: what the gateway may ask of a vocabulary.

Implementations: `gguf.GgufTokenizer` (a model file's own vocabulary) and `bytelevel.ByteTokenizer`
(one token a byte, for scripted models). One contract suite runs over both.
"""

from __future__ import annotations

from typing import Protocol


class Tokenizer(Protocol):
    """A vocabulary. Safe to use from one thread at a time."""

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 … vocab_size - 1."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The id that must start a prompt, or None where the model wants none."""
        ...

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end the model's turn."""
        ...

    @property
    def special_tokens(self) -> dict[str, int]:
        """Control tokens by their spelling. User text never becomes one of these ids."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of plain text. Spellings of control tokens in it are plain text too; no BOS is added."""
        ...

    def piece(self, token_id: int) -> bytes:
        """The bytes of this id in text, none for a control token. Raises IndexError past the vocabulary."""
        ...

    def name(self, token_id: int) -> str:
        """A printable spelling for logprobs; control tokens get theirs, invalid UTF-8 is replaced."""
        ...
