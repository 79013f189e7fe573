"""POST /v1/completions: the older API, plain text in and out.

The same road as chat. A request may bring several prompts, as texts or as token ids; the choices of
the second follow those of the first. `echo` puts the prompt's text before each answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from antiphon.core.errors import BadRequest
from antiphon.gateway.account import Account, account_of
from antiphon.gateway.course import Prepared, Speaker
from antiphon.gateway.desk import Desk
from antiphon.gateway.logprobs import completion_logprobs
from antiphon.gateway.models import AnyModel, RelayedModel, ServedModel, json_response
from antiphon.gateway.parse import parse_completion, read_body
from antiphon.gateway.reply import Completion, CompletionChoice, CompletionLogprobs, Usage
from antiphon.gateway.schema import MAX_CHOICES, CompletionRequest
from antiphon.gateway.sse import KEEP_ALIVE_S, event, send_events
from antiphon.gateway.text import Piece


class Completions:
    """The endpoint."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        account = account_of(scope)
        request = parse_completion(await read_body(scope, receive, self._desk.bounds.max_body_bytes))
        await self._desk.receive(request, account, scope)
        echoes: list[str] = []

        def prepare(model: AnyModel, its: Account) -> Prepared:
            if isinstance(model, RelayedModel):
                raise BadRequest(
                    f"The model {model.name!r} takes chats only: use /v1/chat/completions.", param="model"
                )
            prompts = prompts_of(request, model)
            if request.echo and its is account:
                echoes[:] = [prompt.text for prompt in prompts for _ in range(request.n or 1)]
            return self._desk.generate(request, model, [prompt.ids for prompt in prompts], its)

        course = self._desk.course(request, prepare, account)
        async with self._desk.attend(course, account, receive):
            writer = CompletionWriter(request, course, account, echoes)
            if request.stream:
                await send_events(course.batches(KEEP_ALIVE_S), writer, send)
            else:
                await json_response(writer.body(await course.whole()))(scope, receive, send)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as the model and as the client sees it."""

    ids: list[int]
    text: str


def prompts_of(request: CompletionRequest, model: ServedModel) -> list[Prompt]:
    """The prompts in their order: one text, texts, one list of ids, or lists of ids. Raises BadRequest."""
    items = _items(request.prompt)
    if len(items) * (request.n or 1) > MAX_CHOICES:
        raise BadRequest(
            f"Invalid value for 'prompt': prompts times 'n' are more than {MAX_CHOICES} choices.",
            param="prompt",
        )
    return [_prompt(item, model, request.echo or False) for item in items]


def _items(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    texts = [item for item in prompt if isinstance(item, str)]
    lists = [item for item in prompt if isinstance(item, list)]
    if not prompt or len(prompt) not in (len(ids), len(texts), len(lists)):
        raise BadRequest(
            "Invalid value for 'prompt': send a string, strings, token ids, or lists of token ids.",
            param="prompt",
        )
    return [ids] if ids else [*texts, *lists]


def _prompt(item: str | list[int], model: ServedModel, needs_text: bool) -> Prompt:
    if isinstance(item, str):
        prompt = Prompt(model.text_prompt(item), item)
    else:
        if not all(0 <= token_id < model.tokenizer.vocab_size for token_id in item):
            raise BadRequest(
                f"Invalid value for 'prompt': token ids are 0 to {model.tokenizer.vocab_size - 1}.",
                param="prompt",
            )
        prompt = Prompt(item, model.text_of(item) if needs_text else "")
    if not prompt.ids:
        raise BadRequest("Invalid value for 'prompt': it must not be empty.", param="prompt")
    return prompt


class CompletionWriter:
    """Writes one request's completions: chunk by chunk, or as one body."""

    def __init__(
        self,
        request: CompletionRequest,
        speaker: Speaker,
        account: Account,
        echoes: Sequence[str],
    ) -> None:
        self._request = request
        self._speaker = speaker
        self._account = account
        self._echoes = echoes  # one a choice, or none
        self._id = f"cmpl-{account.request_id.removeprefix('req_')}"
        self._created = int(time.time())
        self._num_written: dict[int, int] = {}  # characters of each choice's text
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # a text chunk of each choice, around its text

    def opening(self) -> bytes:
        """The echoed prompts, where asked for."""
        return b"".join(
            event(self._completion([CompletionChoice(choice, echo, None, None)]))
            for choice, echo in enumerate(self._echoes)
        )

    def chunk(self, piece: Piece) -> bytes:
        """The text, and why it ended."""
        if piece.finish is None and not piece.tokens:
            before, after = self._frame(piece.choice)
            return before + json.dumps(piece.text).encode() + after
        logprobs = self._logprobs(piece) if piece.tokens else None
        choice = CompletionChoice(piece.choice, piece.text, logprobs, piece.finish_reason)
        return event(self._completion([choice]))

    def closing(self) -> bytes:
        """The usage chunk, where it was asked for."""
        if not self._request.wants_usage:
            return b""
        return event(self._completion([], self._account.usage()))

    def body(self, pieces: Sequence[Piece]) -> Completion:
        """All answers at once."""
        choices = []
        for piece in pieces:
            echo = self._echoes[piece.choice] if self._echoes else ""
            logprobs = self._logprobs(piece)
            choices.append(CompletionChoice(piece.choice, echo + piece.text, logprobs, piece.finish_reason))
        return Completion(
            id=self._id,
            created=self._created,
            model=self._request.model,
            system_fingerprint=self._speaker.fingerprint,
            choices=choices,
            usage=self._account.usage(),
        )

    def _logprobs(self, piece: Piece) -> CompletionLogprobs | None:
        if self._request.logprobs is None:
            return None
        offset = self._num_written.get(piece.choice, 0)
        self._num_written[piece.choice] = offset + len(piece.text)
        return completion_logprobs(piece.tokens, offset)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        """A chunk of the stream."""
        return Completion(
            id=self._id,
            created=self._created,
            model=self._request.model,
            system_fingerprint=self._speaker.fingerprint,
            choices=choices,
            usage=usage if self._request.wants_usage else UNSET,
        )

    def _frame(self, choice: int) -> tuple[bytes, bytes]:
        # As in chat: encoded once, cut where the text stands.
        if choice not in self._frames:
            whole = event(self._completion([CompletionChoice(choice, "", None, None)]))
            before, _, after = whole.rpartition(b'"text":""')
            self._frames[choice] = (before + b'"text":', after)
        return self._frames[choice]
