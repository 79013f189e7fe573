"""What the gateway answers: OpenAI's bodies and stream chunks, field for field.

Pure data. Nullable fields that clients read stay in the body as null; fields that must be absent
when unused are UNSET. Floats in here are finite: who builds log probabilities clamps them.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class ErrorBody(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Struct, frozen=True):
    error: ErrorBody


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int = 0
    audio_tokens: int = 0


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(Struct, frozen=True):
    """Tokens of one request. The prompt counts once, whatever `n` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None  # None for control tokens, which stand for no text


class TokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: list[TokenLogprob] | None = None


class CompletionLogprobs(Struct, frozen=True):
    """Four columns of equal length, one row a token. The first token of an echoed prompt has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatAnswerMessage(Struct, frozen=True):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None


class ChatChoice(Struct, frozen=True):
    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | UnsetType = UNSET
    system_fingerprint: str


class ChatDelta(Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    service_tier: str | UnsetType = UNSET
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET  # a key only where the client asked for usage


class CompletionChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(Struct, frozen=True, kw_only=True):
    """Body and stream chunk in one: only the last of a stream's choices have a finish_reason."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class Model(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "antiphon"


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class ClientToken(Struct, frozen=True, kw_only=True):
    """A token is seen once, here. Null bounds are those of its key."""

    object: Literal["client_token"] = "client_token"
    id: str
    token: str
    expires_at: int
    models: tuple[str, ...] | None
    max_tokens: int | None
    requests_per_minute: int | None
    user: str | None


class Health(Struct, frozen=True):
    status: Literal["ok"] = "ok"
