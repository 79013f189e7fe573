"""Bytes of a request to a typed request, or the error that says which field is wrong and why.

Raises errors of core only; never repeats a client's value in a message. Fields that would steer
engine internals, templates or upstream addresses are refused even though other unknown fields are
dropped: a client that sends them expects an effect that it must not have.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope

from antiphon.core.errors import BadRequest, BodyTooLarge, RequestTimeout, UnsupportedMedia
from antiphon.gateway.schema import ChatRequest, ClientTokenRequest, CompletionRequest, SharedFields

BODY_TIMEOUT_S = 30.0
DISCARD_TIMEOUT_S = 5.0
MAX_DISCARDED_BYTES = 64 * 2**20

_STEERING = """
add_generation_prompt add_special_tokens allowed_token_ids api_base api_key api_version bad_words base_url
block_hashes chat_template chat_template_kwargs continue_final_message custom_llm_provider
extra_headers grammar guided_choice guided_grammar guided_json guided_regex image_embeds json_schema
kv_transfer_params logits_processors lora lora_request mm_hashes mm_processor_kwargs priority prompt_embeds
prompt_logprobs prompt_token_ids skip_special_tokens stop_token_ids structured_outputs tokenize user_config
vllm_xargs
"""
_UNSERVED = "audio moderation web_search_options"  # OpenAI's, and they would change the answer
REFUSED = frozenset(f"{_STEERING} {_UNSERVED}".split())

R = TypeVar("R")

_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)
_client_token = msgspec.json.Decoder(ClientTokenRequest)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])

_WHERE = re.compile(r"^(?P<what>.*?) - at (?:`(?:key|value)` in )?`\$(?P<path>[^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]+)`$")
_BOUND = re.compile(
    r"^Expected `(?P<type>int|float|str|array|object)[^`]*` (?P<length>of length )?(?P<op>[<>])"
)
_KINDS = {"int": "integer", "float": "decimal", "str": "string", "array": "array", "object": "object"}
_MAX_SHOWN = 200


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole JSON body. Raises UnsupportedMedia, BodyTooLarge, RequestTimeout."""
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json":
        raise UnsupportedMedia("Send the body as JSON with the header 'Content-Type: application/json'.")
    if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"", b"identity"):
        raise UnsupportedMedia("Compressed request bodies are not accepted; send plain JSON.")
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length[:20]) > max_bytes:
        if b"expect" not in headers:  # who waits for a go-ahead has sent nothing that must be read
            await _discard(receive)
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RequestTimeout("The client left before the request was complete.")
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    del body[:]
                    await _discard(receive)
                    raise _too_large(max_bytes)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise RequestTimeout(f"The request body did not arrive within {BODY_TIMEOUT_S:.0f} s.") from None


async def _discard(receive: Receive) -> None:
    """Read on for a while, keeping nothing: a client that is still sending would not see the answer."""
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_TIMEOUT_S):
            while num_bytes < MAX_DISCARDED_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than {max_bytes} bytes.")


def parse_chat(body: bytes) -> ChatRequest:
    """A checked chat request. Raises BadRequest."""
    request = _decode(body, _chat)
    _check_shared(request)
    _check_chat_features(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise _refused("top_logprobs", "it needs 'logprobs' to be true.")
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """A checked completion request. Raises BadRequest."""
    request = _decode(body, _completion)
    _check_shared(request)
    if request.suffix:
        raise _unserved("suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise _refused("best_of", "only the value of 'n' is supported.", code="unsupported_value")
    if request.echo and request.logprobs is not None:
        why = "it cannot be combined with 'echo': prompt tokens are not scored."
        raise _refused("logprobs", why, code="unsupported_value")
    return request


def parse_client_token(body: bytes) -> ClientTokenRequest:
    """A checked request for a client token. Raises BadRequest."""
    return _decode(body, _client_token)


def _decode(body: bytes, decoder: msgspec.json.Decoder[R]) -> R:
    fields = decoded(body, _fields)
    for name in sorted(fields.keys() & REFUSED):
        if bytes(fields[name]).strip() != b"null":
            raise _unserved(name)
    return decoded(body, decoder)


def decoded(body: bytes, decoder: msgspec.json.Decoder[R]) -> R:
    """A body of any kind. Raises BadRequest."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise BadRequest("The body is nested too deeply.", code="invalid_json") from None


def _check_shared(request: SharedFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise _refused("stream_options", "it is only allowed when 'stream' is true.")


def _check_chat_features(request: ChatRequest) -> None:
    if request.response_format is not None and request.response_format.type != "text":
        known = request.response_format.type in ("json_object", "json_schema")
        raise _unserved("response_format") if known else _refused("response_format.type", "it is not known.")
    for name, value in (("tools", request.tools), ("functions", request.functions)):
        if value:
            raise _unserved(name)
    for name, choice in (("tool_choice", request.tool_choice), ("function_call", request.function_call)):
        if choice not in (None, "none"):
            raise _refused(name, "it is only allowed when 'tools' are given.")
    if request.modalities is not None and request.modalities != ["text"]:
        raise _unserved("modalities")


def _unserved(name: str) -> BadRequest:
    return BadRequest(
        f"Unsupported parameter: '{name}' is not supported by this server.",
        param=name,
        code="unsupported_parameter",
    )


def _refused(param: str, why: str, code: str = "invalid_value") -> BadRequest:
    return BadRequest(f"Invalid value for '{param}': {why}", param=param, code=code)


def _invalid(text: str) -> BadRequest:
    """msgspec's words about the first thing that does not fit, as OpenAI's."""
    where = _WHERE.match(text)
    what, path = (where["what"], where["path"]) if where else (text, "")
    param = path.lstrip(".").replace("[...]", "").replace("[", ".[") or None
    missing = _MISSING.match(what)
    if missing:
        param = f"{param}.{missing['name']}" if param else missing["name"]
        return BadRequest(
            f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
        )
    code = _code(what)
    if what.startswith("Invalid enum value"):
        what = "it is not one of the known values"  # msgspec repeats the value
    what = what.replace(" | null`", "`").replace("`", "")[:_MAX_SHOWN]
    subject = f"'{param}'" if param else "the body"
    return BadRequest(f"Invalid value for {subject}: {what}.", param=param, code=code)


def _code(what: str) -> str:
    bound = _BOUND.match(what)
    if bound is None:
        return "invalid_type" if ", got " in what else "invalid_value"
    side = "above_max" if bound["op"] == "<" else "below_min"
    return f"{_KINDS[bound['type']]}_{side}_{'length' if bound['length'] else 'value'}"
