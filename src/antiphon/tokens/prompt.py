"""Chats and texts to token ids, so that control tokens come from the template alone.

Text a user wrote may spell control tokens; it must stay text whatever the template does with it
(trim, split, join, change case). So a chat is rendered twice: once as it is, and once with a mark,
a character found nowhere in the chat, set into every user text before its first and behind its
last visible character and behind each delimiter, a character other than letters and digits that
occurs in a control token (for a token of letters alone, its first). A spelling without marks inside
it is then the template's own. Those become control ids, the runs between them are encoded as plain
text without the marks.

The marked rendering decides wherever its text is otherwise the plain one, which is nearly always.
A template that looks into its messages (for `</think>`, say) may render marked text differently;
then the plain rendering decides if no message spells a control token and both renderings hold the
same ones, and else the marked one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from antiphon.core.errors import BadRequest
from antiphon.tokens.template import ChatMessage, ChatTemplate
from antiphon.tokens.tokenizer import Tokenizer

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

_PRIVATE_USE = ((0xE000, 0xF900), (0xF0000, 0xFFFFE), (0x100000, 0x10FFFE))
_VISIBLE = re.compile(r"\S")


class PromptBuilder:
    """Builds prompts for one model. As thread-safe as its tokenizer."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        # A spelling of one character has no room for a mark; no chat format uses one.
        self._special = {s: i for s, i in tokenizer.special_tokens.items() if len(s) > 1}
        # Longest first: `<|end|>` must not hide in `<|end|>x` if both are tokens.
        spellings = sorted(self._special, key=len, reverse=True)
        self._spelling = re.compile("|".join(map(re.escape, spellings)) or r"(?!)")
        self._any_case = re.compile(self._spelling.pattern, re.IGNORECASE)
        self._delimiters = sorted(set().union(*map(_delimiters, spellings)))

    def chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Ids of the rendered chat up to where the answer begins. Raises BadRequest."""
        for message in messages:
            if message.role not in ROLES:  # a role lands inside the template's own markup
                raise BadRequest(f"unknown role {message.role!r}", param="messages")
        texts = [text for message in messages for text in (message.content, message.name) if text]
        mark = _unused_character(texts)
        plain = self._template.render(messages)
        marked = self._template.render([self._marked(message, mark) for message in messages])
        if marked.replace(mark, "") != plain and self._is_trustworthy(plain, marked, texts):
            marked = plain
        ids: list[int] = []
        for run, control_id in self._runs(marked):
            ids.extend(self._tokenizer.encode(run.replace(mark, "")) if run else ())
            if control_id is not None:
                ids.append(control_id)
        return self._with_bos(ids)

    def text(self, text: str) -> list[int]:
        """Ids of a bare prompt; all of it is the user's, so no control token comes of it but the BOS."""
        return self._with_bos(self._tokenizer.encode(text))

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self._tokenizer.bos_id
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def _marked(self, message: ChatMessage, mark: str) -> ChatMessage:
        name = message.name
        return msgspec.structs.replace(
            message,
            content=self._marked_text(message.content, mark),
            name=None if name is None else self._marked_text(name, mark),
        )

    def _marked_text(self, text: str, mark: str) -> str:
        first = _VISIBLE.search(text)
        if first is None:
            return text
        start, end = first.start(), len(text.rstrip())
        core = text[start:end]
        for delimiter in self._delimiters:
            core = core.replace(delimiter, delimiter + mark)
        return f"{text[:start]}{mark}{core}{mark}{text[end:]}"

    def _is_trustworthy(self, plain: str, marked: str, texts: list[str]) -> bool:
        """The plain rendering's control tokens are certainly the template's own."""
        return not any(map(self._any_case.search, texts)) and (
            self._spelling.findall(plain) == self._spelling.findall(marked)
        )

    def _runs(self, rendered: str) -> Iterator[tuple[str, int | None]]:
        """The text split at control tokens: what stands before each, and its id; None behind the last."""
        at = 0
        for match in self._spelling.finditer(rendered):
            yield rendered[at : match.start()], self._special[match.group()]
            at = match.end()
        yield rendered[at:], None


def _delimiters(spelling: str) -> set[str]:
    """Characters of a control token behind which a mark breaks its spelling."""
    delimiters = {c for c in spelling if not c.isalnum() and not c.isspace()}
    return delimiters or {spelling[0], spelling[0].lower(), spelling[0].upper()}


def _unused_character(texts: list[str]) -> str:
    """A private-use character that stands in none of the texts."""
    used = set().union(*texts)
    for first, end in _PRIVATE_USE:
        for code in range(first, end):
            if chr(code) not in used:
                return chr(code)
    raise BadRequest("The messages use every private-use character of Unicode.", param="messages")
