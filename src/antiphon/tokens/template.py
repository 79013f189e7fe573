"""Chat messages to the text a model was trained on, by the model's own template.

Owns the compiled template and what it may see: `messages`, `add_generation_prompt` (always true),
`bos_token`, `eos_token`, `tools` and `documents` (none yet), `raise_exception`, `strftime_now`. The
template is compiled once, runs in `sandbox` and may do work in proportion to the messages; what
goes wrong in it, at load or later, is a BadRequest that says what.

Does not tokenise and does not tell user text from the template's: `prompt` does.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from typing import NoReturn

import jinja2
import msgspec

from antiphon.core.errors import BadRequest
from antiphon.tokens.budget import Budget, OverBudget
from antiphon.tokens.sandbox import BUDGET, Sandbox

_MAX_SOURCE_CHARACTERS = 1 << 18
_MAX_MESSAGE_CHARACTERS = 400  # of an error message
_BASE_STEPS, _STEPS_A_MESSAGE = 100_000, 200
_BASE_CHARACTERS, _CHARACTERS_A_CHARACTER = 1 << 22, 64
_PLAIN_DATE_FORMAT = re.compile(r"(?:[^%]|%-?[A-Za-z%]){0,100}")

# What a faulty template can raise beside jinja2.TemplateError: it is a program in a Python-like language.
_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of a chat, as text."""

    role: str
    content: str
    name: str | None = None


class ChatTemplate:
    """A compiled chat template. `render` may be called from any thread."""

    def __init__(self, source: str, bos: str, eos: str) -> None:
        """Raises BadRequest where the template does not compile."""
        if len(source) > _MAX_SOURCE_CHARACTERS:
            raise BadRequest(
                f"The chat template has {len(source)} characters, over {_MAX_SOURCE_CHARACTERS}."
            )
        try:
            self._template = Sandbox().compile_bounded(source)
        except jinja2.TemplateSyntaxError as error:
            raise BadRequest(
                f"The chat template is broken at line {error.lineno}: {_short(error)}"
            ) from error
        except (*_FAULTS, SyntaxError, MemoryError) as error:  # Python's own compiler has limits too
            raise BadRequest(f"The chat template cannot be compiled: {_short(error)}") from error
        self._bos = bos
        self._eos = eos

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt's text. Raises BadRequest where the template refuses the messages or fails."""
        num_characters = sum(len(m.role) + len(m.content) + len(m.name or "") for m in messages)
        budget = Budget(
            _BASE_STEPS + _STEPS_A_MESSAGE * len(messages),
            _BASE_CHARACTERS + _CHARACTERS_A_CHARACTER * num_characters,
        )
        variables = {
            BUDGET: budget,
            "messages": [msgspec.to_builtins(message) for message in messages],
            "add_generation_prompt": True,
            "bos_token": self._bos,
            "eos_token": self._eos,
            "tools": None,
            "documents": None,
            "raise_exception": _refuse,
            "strftime_now": _format_now,
        }
        try:
            return self._template.render(variables)
        except _Refused as error:
            raise BadRequest(f"The model's chat template: {_short(error)}", param="messages") from error
        except OverBudget as error:
            raise BadRequest(f"The model's chat template was stopped: {error}.", param="messages") from error
        except _FAULTS as error:
            raise BadRequest(
                f"The model's chat template failed: {_short(error)}", param="messages"
            ) from error


class _Refused(Exception):
    """The template called `raise_exception`."""


def _refuse(message: object) -> NoReturn:
    raise _Refused(message if isinstance(message, str) else "it refuses these messages")


def _format_now(date_format: str) -> str:
    if not _PLAIN_DATE_FORMAT.fullmatch(date_format):
        raise ValueError("strftime_now takes a short format without widths")
    return datetime.datetime.now().strftime(date_format)


def _short(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= _MAX_MESSAGE_CHARACTERS else text[:_MAX_MESSAGE_CHARACTERS] + "…"
