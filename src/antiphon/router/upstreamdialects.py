"""How servers that take token ids are asked, and what they say: vLLM's and llama-server's own words. Pure.

A dialect turns a generation into the body of one streamed request for one choice, and each event of the
answer into the ids it brought. Ends of turn are not part of an answer's ids, whoever counts them there.

llama-server sends text only when its last character is complete, and then names the last token alone.
What it left out is recovered from the text: those ids spell the same, and are nearly always the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import msgspec

from antiphon.core.catalogue import UpstreamEntry
from antiphon.core.errors import BadRequest
from antiphon.core.generation import Generation, Sampling, Terminal, TokenLogprobs

_NULL = msgspec.Raw(b"null")
_TOKEN_ID = "token_id:"  # how vLLM spells a token that it is to name by its id
_UINT32_MAX = 2**32 - 1  # to llama.cpp: any seed
_MINUS_INFINITY = float("-inf")
_VLLM_ENDS = {"stop": Terminal.STOP, "length": Terminal.LENGTH}
_LLAMA_ENDS = {"eos": Terminal.STOP, "limit": Terminal.LENGTH}
# Of the last event: it would hold the prompt's text otherwise, whatever its size.
_LLAMA_LAST_FIELDS = ("stop", "stop_type", "tokens_predicted", "timings")
E = TypeVar("E")
Encode: TypeAlias = Callable[[str], list[int]]  # text to token ids


@dataclass(frozen=True, slots=True)
class Heard:
    """What one event brought. `logprobs` is empty or as long as `ids`."""

    ids: list[int]
    logprobs: list[TokenLogprobs]
    finish: Terminal | None = None
    num_cached: int | None = None
    error: bytes | None = None


class Unheard(Exception):
    """An event that is not of this dialect."""


class Listener(Protocol):
    """One answer's events in their order."""

    def hear(self, event: bytes) -> Heard:
        """Raises Unheard."""
        ...


class Dialect(Protocol):
    """A server's way of taking token ids."""

    name: str

    def url(self, base: str) -> str:
        """Where requests go, from the URL in the catalogue."""
        ...

    def body(self, generation: Generation, choice: int, model: str, cache_salt: str | None) -> bytes:
        """The request for one choice. Raises BadRequest for a wish that the server cannot fulfil."""
        ...

    def listener(self, generation: Generation) -> Listener:
        """For the answer of one choice."""
        ...


class _VllmLogprobs(msgspec.Struct, frozen=True):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _VllmChoice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None
    logprobs: _VllmLogprobs | None = None
    finish_reason: str | None = None


class _VllmDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _VllmUsage(msgspec.Struct, frozen=True):
    prompt_tokens_details: _VllmDetails | None = None


class _VllmEvent(msgspec.Struct, frozen=True):
    choices: list[_VllmChoice] = []
    usage: _VllmUsage | None = None
    error: msgspec.Raw = _NULL


_vllm_event = msgspec.json.Decoder(_VllmEvent).decode


class Vllm:
    """vLLM's /v1/completions with a list of ids for a prompt."""

    name = "vllm"

    def url(self, base: str) -> str:
        return f"{base.rstrip('/')}/completions"

    def body(self, generation: Generation, choice: int, model: str, cache_salt: str | None) -> bytes:
        sampling = generation.sampling
        body = _wishes(sampling) | {
            "model": model,
            "prompt": generation.token_ids,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "max_tokens": sampling.max_tokens,
            "min_tokens": sampling.min_tokens,
            "seed": (sampling.seed + choice + 2**63) % 2**64 - 2**63,
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": not sampling.stop_ids,
            "logit_bias": {str(token_id): bias for token_id, bias in sampling.logit_bias},
        }
        if sampling.logprobs is not None:
            body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        return msgspec.json.encode(body)

    def listener(self, generation: Generation) -> Listener:
        return _VllmListener(generation.sampling)


class _VllmListener:
    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def hear(self, event: bytes) -> Heard:
        said = _decoded(event, _vllm_event)
        if bytes(said.error) != bytes(_NULL):
            return Heard([], [], error=bytes(said.error))
        details = None if said.usage is None else said.usage.prompt_tokens_details
        num_cached = None if details is None else details.cached_tokens
        if not said.choices:
            return Heard([], [], num_cached=num_cached)
        choice = said.choices[0]
        if choice.token_ids is None and choice.finish_reason is None:
            raise Unheard("no token ids: this vLLM does not know 'return_token_ids'")
        ids = choice.token_ids or []
        logprobs = [] if choice.logprobs is None else self._scores(choice.logprobs)
        finish = _end_of(choice.finish_reason, _VLLM_ENDS) if choice.finish_reason else None
        if finish is Terminal.STOP and ids and ids[-1] in self._sampling.stop_ids:
            ids = ids[:-1]
        return Heard(ids, logprobs[: len(ids)], finish, num_cached)

    def _scores(self, logprobs: _VllmLogprobs) -> list[TokenLogprobs]:
        tops = logprobs.top_logprobs or [None] * len(logprobs.token_logprobs)
        scores = []
        for chosen, top in zip(logprobs.token_logprobs, tops, strict=False):
            best = sorted(
                ((_named(token), _score(value)) for token, value in (top or {}).items()), key=_by_score
            )
            scores.append(TokenLogprobs(_score(chosen), best[: self._sampling.logprobs]))
        return scores


class _LlamaTop(msgspec.Struct, frozen=True):
    id: int
    logprob: float | None = None


class _LlamaScore(msgspec.Struct, frozen=True):
    id: int
    logprob: float | None = None
    top_logprobs: list[_LlamaTop] = []


class _LlamaTimings(msgspec.Struct, frozen=True):
    cache_n: int | None = None


class _LlamaEvent(msgspec.Struct, frozen=True):
    content: str = ""
    tokens: list[int] = []
    stop: bool = False
    stop_type: str = ""
    tokens_predicted: int = 0
    completion_probabilities: list[_LlamaScore] = []
    timings: _LlamaTimings | None = None
    error: msgspec.Raw = _NULL


_llama_event = msgspec.json.Decoder(_LlamaEvent).decode


class LlamaServer:
    """llama-server's own /completion. `encode` gives the ids of plain text."""

    name = "llama-server"

    def __init__(self, encode: Encode) -> None:
        self._encode = encode

    def url(self, base: str) -> str:
        return f"{base.rstrip('/').removesuffix('/v1')}/completion"

    def body(self, generation: Generation, choice: int, model: str, cache_salt: str | None) -> bytes:
        sampling = generation.sampling
        if sampling.min_tokens:
            raise BadRequest("The server behind this model knows no 'min_tokens'.", param="min_tokens")
        body = _wishes(sampling) | {
            "model": model,
            "prompt": generation.token_ids,
            "stream": True,
            "return_tokens": True,
            "n_predict": sampling.max_tokens,
            "cache_prompt": True,
            "seed": (sampling.seed + choice) % _UINT32_MAX,
            "repeat_last_n": sampling.max_tokens,  # it counts prompt tokens too where the answer is shorter
            "ignore_eos": not sampling.stop_ids,
            "logit_bias": [[token_id, bias] for token_id, bias in sampling.logit_bias],
            "response_fields": _LLAMA_LAST_FIELDS,
        }
        if sampling.logprobs is not None:
            body["n_probs"] = max(sampling.logprobs, 1)
        return msgspec.json.encode(body)

    def listener(self, generation: Generation) -> Listener:
        return _LlamaListener(generation.sampling, self._encode)


class _LlamaListener:
    def __init__(self, sampling: Sampling, encode: Encode) -> None:
        self._sampling = sampling
        self._encode = encode
        self._num_heard = 0  # tokens that it has computed

    def hear(self, event: bytes) -> Heard:
        said = _decoded(event, _llama_event)
        if bytes(said.error) != bytes(_NULL):
            return Heard([], [], error=bytes(said.error))
        if said.stop:
            num_cached = None if said.timings is None else said.timings.cache_n
            return Heard([], [], _end_of(said.stop_type, _LLAMA_ENDS), num_cached)
        ids = [token_id for token_id in said.tokens if token_id not in self._sampling.stop_ids]
        num_missing = said.tokens_predicted - self._num_heard - len(said.tokens)
        self._num_heard = max(said.tokens_predicted, self._num_heard)
        if num_missing > 0 and said.content:
            ids = self._encode(said.content)
        return Heard(ids, self._scores(ids, said.completion_probabilities))

    def _scores(self, ids: list[int], said: list[_LlamaScore]) -> list[TokenLogprobs]:
        """The last token's are known; one that was left out has none."""
        if self._sampling.logprobs is None or not ids:
            return []
        unknown = [TokenLogprobs(_MINUS_INFINITY)] * (len(ids) - 1)
        if not said:
            return [*unknown, TokenLogprobs(_MINUS_INFINITY)]
        best = [(top.id, _score(top.logprob)) for top in said[-1].top_logprobs]
        return [*unknown, TokenLogprobs(_score(said[-1].logprob), best[: self._sampling.logprobs])]


def _wishes(sampling: Sampling) -> dict[str, object]:
    """What both spell alike."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }


def dialect_of(entry: UpstreamEntry, encode: Encode) -> Dialect:
    """The one that this upstream speaks."""
    return Vllm() if entry.by == "vllm-ids" else LlamaServer(encode)


def _end_of(reason: str, ends: dict[str, Terminal]) -> Terminal:
    if reason not in ends:
        raise Unheard("an unknown reason to end")
    return ends[reason]


def _decoded(event: bytes, decode: Callable[[bytes], E]) -> E:
    try:
        return decode(event)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Unheard("an event that does not decode") from None  # no cause: it quotes the event


def _named(token: str) -> int:
    number = token.removeprefix(_TOKEN_ID)
    if not number.isascii() or not number.isdigit():
        raise Unheard("a token that is not named by its id")
    return int(number[:10])


def _score(value: float | None) -> float:
    return _MINUS_INFINITY if value is None else value


def _by_score(entry: tuple[int, float]) -> float:
    return -entry[1]
