"""A chat as it is sent to another server, and the events it sends back. Pure.

The body is built anew from what was parsed and checked: no field, header or byte of the client's passes
by unseen. Fields that only the wish of a client puts there (`top_k`, `min_p` …) are sent only where it
wished. What is read is typed; what does not fit raises msgspec.ValidationError.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from antiphon.core.generation import Terminal
from antiphon.gateway.logprobs import finite
from antiphon.gateway.reply import TokenLogprob, TopLogprob
from antiphon.gateway.schema import ChatRequest
from antiphon.tokens.template import ChatMessage

_AS_THEY_CAME = (
    *("n", "seed", "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("max_tokens", "max_completion_tokens", "logprobs", "top_logprobs"),
    *("top_k", "min_p", "min_tokens", "ignore_eos"),
    *("user", "safety_identifier", "prompt_cache_key"),
)
_NULL = msgspec.Raw(b"null")
_ENDS = {
    "stop": Terminal.STOP,
    "length": Terminal.LENGTH,
    "content_filter": Terminal.CONTENT_FILTER,
}


def chat_body(
    request: ChatRequest, messages: Sequence[ChatMessage], model: str, cache_salt: str | None
) -> bytes:
    """The body of a streamed chat request for a model of this name there."""
    body: dict[str, object] = {
        "model": model,
        "messages": [msgspec.to_builtins(message) for message in messages],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.stops:
        body["stop"] = request.stops
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    for name in _AS_THEY_CAME:
        value = getattr(request, name)
        if value is not None:
            body[name] = value
    return msgspec.json.encode(body)


class _TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float | None = None
    bytes: list[int] | None = None


class _TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float | None = None
    bytes: list[int] | None = None
    top_logprobs: list[_TopLogprob] | None = None


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[_TokenLogprob] | None = None


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    """What one event says of one choice."""

    index: int = 0
    delta: _Delta | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "" if self.delta is None else self.delta.content or ""

    @property
    def is_progress(self) -> bool:
        """Whether a token came, be it one of thought that is not passed on."""
        delta = self.delta
        return delta is not None and bool(delta.content or delta.reasoning_content or delta.reasoning)

    @property
    def calls_tools(self) -> bool:
        return self.delta is not None and bool(self.delta.tool_calls)

    @property
    def finish(self) -> Terminal | None:
        """How the choice ended, None while it goes on. Raises KeyError for a word that we do not know."""
        return _ENDS[self.finish_reason] if self.finish_reason else None

    def scores(self) -> list[TokenLogprob]:
        """The log probabilities of its tokens."""
        entries = [] if self.logprobs is None else self.logprobs.content or []
        return [
            TokenLogprob(
                entry.token,
                _logprob(entry.logprob),
                entry.bytes,
                [TopLogprob(top.token, _logprob(top.logprob), top.bytes) for top in entry.top_logprobs or []],
            )
            for entry in entries
        ]


class _TokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class ChunkUsage(msgspec.Struct, frozen=True):
    """Tokens as the server counted them; None where an event does not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _TokensDetails | None = None


class Chunk(msgspec.Struct, frozen=True):
    """One event of a chat stream."""

    choices: list[ChunkChoice] = []
    usage: ChunkUsage | None = None
    error: msgspec.Raw = _NULL
    system_fingerprint: str | None = None

    @property
    def fault(self) -> bytes | None:
        """The error object that is there instead of an answer, as JSON."""
        return None if self.error == _NULL else bytes(self.error)


read_chunk = msgspec.json.Decoder(Chunk).decode


def _logprob(value: float | None) -> float:
    return finite(float("-inf") if value is None else value)
