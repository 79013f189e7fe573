"""The requests that clients send, with their bounds.

Decoded strictly: no number out of a string, no integer out of 1.0 or true. `null` means absent in
every optional field. Fields that are not named here are dropped: clients send all sorts of them.
Named but not served features are refused in `parse`, never ignored where they would change the answer.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Raw, Struct

from antiphon.gateway.clienttokens import MAX_MINUTES

MAX_CHOICES = 128
MAX_LOGIT_BIAS = 1024
MAX_CACHE_WORD = 256
COMPLETION_MAX_TOKENS = 16
MAX_TOKEN_MODELS = 16
MAX_COUNT = 2**53 - 1  # what every JSON reader keeps exactly

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
_LABEL = r"^[A-Za-z0-9._:@-]{1,64}$(?!\n)"  # shown in logs: an identifier, no text
StopText = Annotated[str, Meta(max_length=1024)]


class ContentPart(Struct, frozen=True):
    """One part of a message. Only text and refusal parts are served."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Message(Struct, frozen=True):
    """One message of a conversation."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    refusal: str | None = None
    tool_calls: list[Raw] | None = None
    tool_call_id: str | None = None


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(Struct, frozen=True):
    type: str


class SharedFields(Struct, frozen=True, kw_only=True):
    """What both generating endpoints take.

    `top_k`, `min_p`, `min_tokens`, `ignore_eos` and `cache_salt` go beyond OpenAI's API and mean what they
    mean in vLLM.
    """

    model: Annotated[str, Meta(min_length=1)]
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=4)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None  # -1 and 0: all
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[int, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIAS)] | None
    ) = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_CACHE_WORD)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=MAX_CACHE_WORD)] | None = None

    @property
    def stops(self) -> list[str]:
        """The stop strings. Empty ones would match everywhere and are left out."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(SharedFields, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    PROMPT_FIELD: ClassVar[str] = "messages"

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    service_tier: str | None = None
    response_format: ResponseFormat | None = None
    tools: list[Raw] | None = None
    tool_choice: str | dict[str, Raw] | None = None
    functions: list[Raw] | None = None
    function_call: str | dict[str, Raw] | None = None
    modalities: list[str] | None = None
    safety_identifier: Annotated[str, Meta(max_length=64)] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=16),
        ]
        | None
    ) = None

    @property
    def answer_limit(self) -> int | None:
        """Most answer tokens, None for as many as fit. The newer spelling wins."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives are scored at each position, None for no scores."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(SharedFields, frozen=True, kw_only=True):
    """Body of POST /v1/completions."""

    PROMPT_FIELD: ClassVar[str] = "prompt"

    prompt: str | list[str | int | list[int]]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    best_of: Annotated[int, Meta(ge=0, le=20)] | None = None
    suffix: str | None = None

    @property
    def answer_limit(self) -> int:
        """Most answer tokens."""
        return COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives are scored at each position, None for no scores."""
        return self.logprobs


GeneratingRequest = ChatRequest | CompletionRequest


class ClientTokenRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/client_tokens. A field that is misspelt is an error: it would be a bound less."""

    minutes: Annotated[int, Meta(ge=1, le=MAX_MINUTES)] = 15
    models: (
        Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_TOKEN_MODELS)]
        | None
    ) = None  # None: all that the key may use
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_COUNT)] | None = None  # prompts and answers, over its life
    requests_per_minute: Annotated[int, Meta(ge=1, le=MAX_COUNT)] | None = None
    user: Annotated[str, Meta(pattern=_LABEL)] | None = None
