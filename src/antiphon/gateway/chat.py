"""POST /v1/chat/completions, told from top to bottom.

    parse -> models that may answer -> prompt and generation, or the messages -> pieces -> chunks or one body

What is wrong raises before the first byte. Streams and bodies are made of the same pieces, so that a
stream's deltas joined are the body's content.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from msgspec import UNSET, UnsetType
from starlette.types import Receive, Scope, Send

from antiphon.core.errors import BadRequest
from antiphon.gateway.account import Account, account_of
from antiphon.gateway.course import Prepared, Speaker
from antiphon.gateway.desk import Desk
from antiphon.gateway.models import AnyModel, RelayedModel, json_response
from antiphon.gateway.parse import parse_chat, read_body
from antiphon.gateway.reply import (
    ChatAnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    FinishReason,
    Usage,
)
from antiphon.gateway.schema import ChatRequest, Message
from antiphon.gateway.sse import KEEP_ALIVE_S, event, send_events
from antiphon.gateway.text import Piece
from antiphon.gateway.urgency import tier_name
from antiphon.tokens.template import ChatMessage

_UNSERVED_PARTS = frozenset({"image_url", "input_audio", "file", "video_url"})


class ChatCompletions:
    """The endpoint."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        account = account_of(scope)
        request = parse_chat(await read_body(scope, receive, self._desk.bounds.max_body_bytes))
        await self._desk.receive(request, account, scope)
        messages = chat_messages(request.messages)

        def prepare(model: AnyModel, its: Account) -> Prepared:
            if isinstance(model, RelayedModel):
                return self._desk.relay(request, messages, model, its)
            return self._desk.generate(request, model, [model.chat_prompt(messages)], its)

        course = self._desk.course(request, prepare, account)
        async with self._desk.attend(course, account, receive):
            writer = ChatWriter(request, course, account)
            if request.stream:
                await send_events(course.batches(KEEP_ALIVE_S), writer, send)
            else:
                await json_response(writer.body(await course.whole()))(scope, receive, send)


class ChatWriter:
    """Writes one chat answer: chunk by chunk, or as one body."""

    def __init__(self, request: ChatRequest, speaker: Speaker, account: Account) -> None:
        self._request = request
        self._speaker = speaker
        self._account = account
        self._id = f"chatcmpl-{account.request_id.removeprefix('req_')}"
        self._created = int(time.time())
        self._frames: list[tuple[bytes, bytes]] = []  # a text chunk of each choice, around its text
        self._fingerprint = ""

    def opening(self) -> bytes:
        """The role chunks, in the order of the choices: clients refuse a later choice that comes first."""
        self._fingerprint = self._speaker.fingerprint
        choices = range(self._request.n or 1)
        self._frames = [self._frame(choice) for choice in choices]
        return b"".join(self._event(choice, ChatDelta(role="assistant", content="")) for choice in choices)

    def chunk(self, piece: Piece) -> bytes:
        """The text, and where it ends a chunk that says why."""
        events = b""
        if piece.tokens:
            logprobs = ChatLogprobs(list(piece.tokens))
            events = self._event(piece.choice, ChatDelta(content=piece.text), logprobs)
        elif piece.text:
            before, after = self._frames[piece.choice]
            events = before + json.dumps(piece.text).encode() + after
        if piece.finish is not None:
            events += self._event(piece.choice, ChatDelta(), reason=piece.finish_reason)
        return events

    def closing(self) -> bytes:
        """The usage chunk, where it was asked for."""
        if not self._request.wants_usage:
            return b""
        return event(self._chunk([], self._account.usage()))

    def body(self, pieces: Sequence[Piece]) -> ChatCompletion:
        """The whole answer at once."""
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._request.model,
            choices=[self._choice(piece) for piece in pieces],
            usage=self._account.usage(),
            service_tier=self._tier(),
            system_fingerprint=self._speaker.fingerprint,
        )

    def _choice(self, piece: Piece) -> ChatChoice:
        logprobs = ChatLogprobs(list(piece.tokens)) if self._request.logprobs else None
        message = ChatAnswerMessage("assistant", piece.text)
        return ChatChoice(piece.choice, message, logprobs, piece.finish_reason)

    def _event(
        self,
        choice: int,
        delta: ChatDelta,
        logprobs: ChatLogprobs | None = None,
        reason: FinishReason | None = None,
    ) -> bytes:
        return event(self._chunk([ChatChunkChoice(choice, delta, logprobs, reason)]))

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._id,
            created=self._created,
            model=self._request.model,
            service_tier=self._tier(),
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=usage if self._request.wants_usage else UNSET,
        )

    def _frame(self, choice: int) -> tuple[bytes, bytes]:
        # The commonest event by far: encoded once, cut where its text stands, joined around each text.
        before, _, after = self._event(choice, ChatDelta(content="")).rpartition(b'"content":""')
        return before + b'"content":', after

    def _tier(self) -> str | UnsetType:
        asked = self._request.service_tier
        return UNSET if asked is None else tier_name(asked, self._account.priority)


def chat_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """Messages as the template sees them. Raises BadRequest for what has no text."""
    return [_chat_message(message, f"messages.[{index}]") for index, message in enumerate(messages)]


def _chat_message(message: Message, where: str) -> ChatMessage:
    if message.role in ("tool", "function") or message.tool_calls:
        raise BadRequest(
            "Tool calls in the history are not supported by this server.",
            param=f"{where}.role" if message.role in ("tool", "function") else f"{where}.tool_calls",
            code="unsupported_parameter",
        )
    role = "system" if message.role == "developer" else message.role
    return ChatMessage(role, _text_of(message, f"{where}.content"), message.name)


def _text_of(message: Message, where: str) -> str:
    content = message.content
    if content is None and message.role == "assistant":
        content = message.refusal
    if isinstance(content, str):
        return content
    if not content:
        raise BadRequest(f"Invalid value for '{where}': the message has no text.", param=where)
    texts = []
    for index, part in enumerate(content):
        text = {"text": part.text, "refusal": part.refusal}.get(part.type)
        if text is None:
            kind = f"'{part.type}'" if part.type in _UNSERVED_PARTS else "such"
            raise BadRequest(
                f"Invalid value for '{where}.[{index}]': {kind} parts are not supported by this server; send "
                "parts of type 'text' (with 'text') or 'refusal' (with 'refusal').",
                param=f"{where}.[{index}]",
            )
        texts.append(text)
    return "\n".join(texts)
