"""How many leading tokens of a prompt the operator has made public.

The operator lists system prompts that every tenant may share KV of. A prompt that begins with the
token ids of such a chat, to the last one, is public so far; what follows is its tenant's own. Only
ids decide: text that merely looks alike, or is a part of a listed one, is not public.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from antiphon.core.errors import BadRequest
from antiphon.tokens.template import ChatMessage

# Chats that differ where the public part ends, in every way a text can begin: tokens reach over that border.
_PROBES = ("a", "7", ".", "\n\nx", "  é", "中")

ChatPrompt = Callable[[Sequence[ChatMessage]], list[int]]


class PublicPrefixes:
    """The public beginnings of one model's prompts."""

    def __init__(self, prefixes: Sequence[Sequence[int]] = ()) -> None:
        self._prefixes = sorted((list(ids) for ids in prefixes if ids), key=len, reverse=True)

    @classmethod
    def of_systems(cls, systems: Sequence[str], chat_prompt: ChatPrompt) -> PublicPrefixes:
        """Those of chats with these system prompts. Raises BadRequest where the model takes none."""
        return cls([_prefix(system, chat_prompt) for system in systems])

    def num_public(self, prompt: Sequence[int]) -> int:
        """Leading tokens of `prompt` that are public: those of the longest prefix it begins with."""
        for ids in self._prefixes:
            # The last id differs nearly always, so that the rest is seldom compared.
            if len(prompt) >= len(ids) and prompt[len(ids) - 1] == ids[-1] and prompt[: len(ids)] == ids:
                return len(ids)
        return 0


def _prefix(system: str, chat_prompt: ChatPrompt) -> list[int]:
    try:
        chats = [chat_prompt([ChatMessage("system", system), ChatMessage("user", text)]) for text in _PROBES]
    except BadRequest as error:
        raise BadRequest(f"the public system prompt {system[:40]!r} has no place here: {error}") from error
    columns = takewhile(lambda ids: len(set(ids)) == 1, zip(*chats, strict=False))
    return [ids[0] for ids in columns]
