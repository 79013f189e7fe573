"""Bodies to typed requests: what is accepted, and which field is named where it is not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import BadRequest, BodyTooLarge, RequestTimeout, UnsupportedMedia
from antiphon.gateway import parse
from antiphon.gateway.parse import parse_chat, parse_completion, read_body

SMALLEST: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def chat_error(**fields: object) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse_chat(json.dumps(SMALLEST | fields).encode())
    return caught.value


def completion_error(**fields: object) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse_completion(json.dumps({"model": "m", "prompt": "hi"} | fields).encode())
    return caught.value


FIELDS: list[tuple[dict[str, object], str, str]] = [
    ({"model": 5}, "model", "invalid_type"),
    ({"model": ""}, "model", "string_below_min_length"),
    ({"messages": []}, "messages", "array_below_min_length"),
    ({"messages": {}}, "messages", "invalid_type"),
    ({"messages": [{"content": "x"}]}, "messages.[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.[0].role", "invalid_value"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages.[0].content.[0]", "invalid_type"),
    ({"n": 0}, "n", "integer_below_min_value"),
    ({"n": 129}, "n", "integer_above_max_value"),
    ({"n": 10**9}, "n", "integer_above_max_value"),
    ({"n": True}, "n", "invalid_type"),
    ({"n": 1.0}, "n", "invalid_type"),
    ({"n": "1"}, "n", "invalid_type"),
    ({"temperature": -0.1}, "temperature", "decimal_below_min_value"),
    ({"temperature": 2.1}, "temperature", "decimal_above_max_value"),
    ({"temperature": "0.5"}, "temperature", "invalid_type"),
    ({"top_p": 1.5}, "top_p", "decimal_above_max_value"),
    ({"top_k": -2}, "top_k", "integer_below_min_value"),
    ({"min_p": 2}, "min_p", "decimal_above_max_value"),
    ({"presence_penalty": 3}, "presence_penalty", "decimal_above_max_value"),
    ({"frequency_penalty": -3}, "frequency_penalty", "decimal_below_min_value"),
    ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    ({"max_tokens": -1}, "max_tokens", "integer_below_min_value"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
    ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
    ({"max_tokens": True}, "max_tokens", "invalid_type"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "integer_below_min_value"),
    ({"min_tokens": -1}, "min_tokens", "integer_below_min_value"),
    ({"seed": 2**63}, "seed", "integer_above_max_value"),
    ({"seed": 1.5}, "seed", "invalid_type"),
    ({"stop": 5}, "stop", "invalid_type"),
    ({"stop": ["a"] * 5}, "stop", "array_above_max_length"),
    ({"stop": [5]}, "stop.[0]", "invalid_type"),
    ({"stop": "x" * 1025}, "stop", "string_above_max_length"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "decimal_above_max_value"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "object_above_max_length"),
    ({"logprobs": 1}, "logprobs", "invalid_type"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"metadata": {"k": "v" * 513}}, "metadata", "string_above_max_length"),
    ({"metadata": {str(i): "v" for i in range(17)}}, "metadata", "object_above_max_length"),
    ({"safety_identifier": "x" * 65}, "safety_identifier", "string_above_max_length"),
    ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ({"tool_choice": "auto"}, "tool_choice", "invalid_value"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "invalid_value"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "unsupported_parameter"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    ({"audio": {"voice": "alloy"}}, "audio", "unsupported_parameter"),
    ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
]


@pytest.mark.parametrize(
    ("fields", "param", "code"), FIELDS, ids=[f"{f[1]}-{i}" for i, f in enumerate(FIELDS)]
)
def test_a_bad_field_is_named(fields: dict[str, object], param: str, code: str) -> None:
    """`param` is the field and `code` says what is wrong with it."""
    error = chat_error(**fields)
    assert (error.param, error.code, error.status) == (param, code, 400)
    assert param.split(".")[0] in error.message


STEERING = (
    "chat_template chat_template_kwargs tokenize prompt_embeds image_embeds mm_hashes block_hashes "
    "kv_transfer_params api_base base_url api_key user_config guided_json structured_outputs"
)


@pytest.mark.parametrize("name", STEERING.split())
def test_fields_that_steer_internals_are_refused(name: str) -> None:
    """On both endpoints, whatever their value; null means absent."""
    for value in ("x", {}, [], False, 0):
        for error in (chat_error(**{name: value}), completion_error(**{name: value})):
            assert (error.param, error.code) == (name, "unsupported_parameter")
    assert parse_chat(json.dumps(SMALLEST | {name: None}).encode()).model == "m"


def test_null_means_absent_everywhere() -> None:
    """A client library that spells out every field with null gets the defaults."""
    names = [name for name in parse.ChatRequest.__struct_fields__ if name not in SMALLEST]
    request = parse_chat(json.dumps(SMALLEST | dict.fromkeys(names)).encode())
    assert request == parse_chat(json.dumps(SMALLEST).encode())


def test_unknown_fields_are_dropped() -> None:
    """Clients send all sorts of fields."""
    request = parse_chat(json.dumps(SMALLEST | {"store": True, "verbosity": "low", "x": {"y": [1]}}).encode())
    assert request == parse_chat(json.dumps(SMALLEST).encode())


def test_harmless_spellings_of_features_not_served_pass() -> None:
    """Asking for nothing special is no reason to be refused."""
    fields = {
        "tools": [],
        "tool_choice": "none",
        "functions": [],
        "function_call": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "stop": ["", "end"],
    }
    assert parse_chat(json.dumps(SMALLEST | fields).encode()).stops == ["end"]


def test_the_newer_token_limit_wins() -> None:
    """Where both spellings are sent."""
    request = parse_chat(json.dumps(SMALLEST | {"max_tokens": 7, "max_completion_tokens": 3}).encode())
    assert request.answer_limit == 3


COMPLETIONS: list[tuple[dict[str, object], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [[["a"]]]}, "prompt.[0].[0]"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 21}, "best_of"),
    ({"best_of": 3}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"echo": True, "logprobs": 1}, "logprobs"),
    ({"max_tokens": -1}, "max_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), COMPLETIONS)
def test_a_bad_completion_field_is_named(fields: dict[str, object], param: str) -> None:
    """The older endpoint names fields as the newer one does."""
    error = completion_error(**fields)
    assert error.param == param
    assert error.status == 400


MESSAGE = b'{"model":"m","messages":[{"role":"user","content":"x"}],'

BODIES = {
    "empty": b"",
    "not json": b"hello",
    "list": b"[1]",
    "string": b'"s"',
    "null": b"null",
    "nothing": b"{}",
    "bom": b"\xef\xbb\xbf" + json.dumps(SMALLEST).encode(),
    "bad utf-8": b'{"model":"\xff","messages":[]}',
    "lone surrogate": b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
    "lone surrogate in a role": b'{"model":"m","messages":[{"role":"\\ud800","content":"x"}]}',
    "lone surrogate in an unknown field": b'{"model":"m","messages":[],"x":"\\udfff"}',
    "lone surrogate in a key": b'{"\\ud800":1,"model":"m","messages":[]}',
    "nan": b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
    "infinity": b'{"model":"m","messages":[{"role":"user","content":"x"}],"top_p":Infinity}',
    "1e400": b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":1e400}',
    "1e400 as int": b'{"model":"m","messages":[{"role":"user","content":"x"}],"n":1e400}',
    "5000 digits": MESSAGE + b'"n":' + b"9" * 5000 + b"}",
    "5000 digits as float": b'{"model":"m","messages":[{"role":"user","content":"x"}],"top_p":'
    + b"9" * 5000
    + b"}",
    "deep lists": b'{"model":"m","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep unknown": b'{"x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "trailing": json.dumps(SMALLEST).encode() + b" x",
    "two": json.dumps(SMALLEST).encode() * 2,
}


@pytest.mark.parametrize("name", BODIES)
def test_a_broken_body_is_the_clients_mistake(name: str) -> None:
    """Never anything but a 400, and the message does not repeat the body."""
    for parser in (parse_chat, parse_completion):
        with pytest.raises(BadRequest) as caught:
            parser(BODIES[name])
        assert caught.value.status == 400
        assert len(caught.value.message) < 400
        assert "999999" not in caught.value.message


def test_messages_never_repeat_what_the_client_sent() -> None:
    """A secret in the wrong place does not travel through error messages."""
    secret = "canary" * 1000
    for fields in (
        {"messages": [{"role": secret, "content": "x"}]},
        {"response_format": {"type": secret}},
        {"stop": [secret]},
        {"n": secret},
        {"tool_choice": secret},
    ):
        assert "canary" not in chat_error(**fields).message


def test_duplicate_keys_last_wins() -> None:
    """As in every JSON library."""
    body = b'{"model":"a","messages":[{"role":"user","content":"x"}],"model":"b"}'
    assert parse_chat(body).model == "b"


def test_ordinary_oddities_pass() -> None:
    """NUL, line separators, right-to-left marks and joined emoji are text like any other."""
    text = "a\0b\u2028c\u202ed👩‍👩‍👧\r\n"
    request = parse_chat(json.dumps(SMALLEST | {"messages": [{"role": "user", "content": text}]}).encode())
    assert request.messages[0].content == text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
field_names = st.sampled_from(
    [*parse.ChatRequest.__struct_fields__, *parse.CompletionRequest.__struct_fields__]
)


@given(st.dictionaries(field_names, json_values, max_size=5), st.booleans())
def test_any_json_is_parsed_or_a_bad_request(fields: dict[str, object], is_chat: bool) -> None:
    """Values of any type in any field never raise anything else."""
    body = json.dumps(SMALLEST | {"prompt": "x"} | fields).encode("utf-8", "surrogatepass")
    try:
        (parse_chat if is_chat else parse_completion)(body)
    except BadRequest as error:
        assert error.message


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_a_bad_request(body: bytes) -> None:
    """Whatever comes over the wire."""
    with pytest.raises(BadRequest):
        parse_chat(body)


def scope(**headers: str) -> dict[str, Any]:
    given = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    return {"type": "http", "headers": [(k.encode(), v.encode()) for k, v in given.items()]}


def receiving(*parts: bytes) -> Any:
    """A receive callable that brings the body in these parts."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages[-1]["more_body"] = False

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    return receive


async def test_a_body_in_parts_is_joined() -> None:
    """However it was chunked."""
    assert await read_body(scope(), receiving(b"ab", b"", b"c"), 3) == b"abc"


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "", "application/x-www-form-urlencoded", "application/jsonp", "multipart/form-data"],
)
async def test_only_json_is_read(kind: str) -> None:
    """Other types are what a page of another site can send without asking."""
    with pytest.raises(UnsupportedMedia):
        await read_body(scope(content_type=kind), receiving(b"{}"), 100)


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
async def test_json_types(kind: str) -> None:
    """Parameters and case do not matter."""
    assert await read_body(scope(content_type=kind), receiving(b"{}"), 100) == b"{}"


async def test_compressed_bodies_are_refused() -> None:
    """They could unfold to any size."""
    with pytest.raises(UnsupportedMedia):
        await read_body(scope(content_encoding="gzip"), receiving(b"{}"), 100)


@pytest.mark.parametrize("length", ["101", "9" * 30])
async def test_an_announced_length_is_refused_before_reading(length: str) -> None:
    """A client that waits for a go-ahead does not get it."""

    async def never() -> dict[str, Any]:
        raise AssertionError("the body was read")

    with pytest.raises(BodyTooLarge):
        await read_body(scope(content_length=length, expect="100-continue"), never, 100)


@pytest.mark.parametrize("headers", [{}, {"content_length": "150"}])
async def test_the_rest_of_a_large_body_is_read_away(headers: dict[str, str]) -> None:
    """Else its sender would see a broken connection in place of the error."""
    parts = [b"x" * 60] * 3
    receive = receiving(*parts)
    with pytest.raises(BodyTooLarge):
        await read_body(scope(**headers), receive, 100)
    with pytest.raises(IndexError):
        await receive()


async def test_reading_away_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes, for a sender without end; in time, for one that stops."""
    monkeypatch.setattr(parse, "MAX_DISCARDED_BYTES", 1000)
    monkeypatch.setattr(parse, "DISCARD_TIMEOUT_S", 0.01)
    num_parts = 0

    async def endless() -> dict[str, Any]:
        nonlocal num_parts
        num_parts += 1
        return {"type": "http.request", "body": b"x" * 101, "more_body": True}

    with pytest.raises(BodyTooLarge):
        await read_body(scope(), endless, 100)
    assert num_parts == 1 + 10

    async def stuck() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    with pytest.raises(BodyTooLarge):
        await read_body(scope(content_length="101"), stuck, 100)


async def test_a_slow_body_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client cannot hold a request open by not sending it."""
    monkeypatch.setattr(parse, "BODY_TIMEOUT_S", 0.01)

    async def stuck() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    with pytest.raises(RequestTimeout):
        await read_body(scope(), stuck, 100)
