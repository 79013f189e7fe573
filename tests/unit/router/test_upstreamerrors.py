"""What another server says went wrong, as errors of ours."""

from __future__ import annotations

import datetime
import email.utils
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import AntiphonError, BadRequest, Busy, ContextTooLong, NoReplica, UpstreamFault
from antiphon.router.upstreamerrors import MAX_RETRY_AFTER_S, log_code, of_event, of_response, retry_after_s


def body(**fields: object) -> bytes:
    return json.dumps(
        {"error": {"message": "words", "type": "t", "param": None, "code": None} | fields}
    ).encode()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, BadRequest) for status in (400, 409, 413, 415, 422)),
        *((status, UpstreamFault) for status in (301, 302, 401, 403, 404, 405, 407, 500, 502, 504, 599, 204)),
        (429, Busy),
        (503, NoReplica),
    ],
)
def test_statuses(status: int, kind: type[AntiphonError]) -> None:
    """The client's mistakes stay its own; its words are passed on for these alone."""
    error = of_response("m", status, None, body())
    assert type(error) is kind
    assert ("words" in error.message) == (kind is BadRequest)


@pytest.mark.parametrize(
    "said",
    [
        body(code="context_length_exceeded"),
        body(type="exceed_context_size_error", code=400),
    ],
)
def test_a_context_that_is_too_long(said: bytes) -> None:
    """OpenAI's code, and llama-server's type."""
    error = of_response("m", 400, None, said)
    assert isinstance(error, ContextTooLong)
    assert (error.code, error.param) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (b'{"error": "plain"}', "plain"),
        (b'{"object": "error", "message": "flat", "code": 400}', "flat"),
        (body(message="a\nb\x00c\u202e"), "a b c"),
        (body(message="x" * 9999), "x" * 500),
        (body(message=5), "The server behind the model 'm' refused this request."),
        (b"<html>", "The server behind the model 'm' refused this request."),
        (b'{"error": [1]}', "The server behind the model 'm' refused this request."),
        (b'{"error": null}', "The server behind the model 'm' refused this request."),
        (b"[" * 100_000, "The server behind the model 'm' refused this request."),
        (b"\xff", "The server behind the model 'm' refused this request."),
    ],
)
def test_words_are_found_cut_and_cleaned(said: bytes, message: str) -> None:
    """Whatever shape they come in."""
    assert of_response("m", 400, None, said).message == message


@given(st.binary(max_size=200), st.integers(100, 599))
def test_no_body_breaks_it(said: bytes, status: int) -> None:
    """There is always an error with a message."""
    assert of_response("m", status, "x", said).message
    assert log_code(said) is None or log_code(said)


def test_waits() -> None:
    """Seconds or a date, never below a second, never longer than an hour; nonsense is none."""
    assert retry_after_s("17") == 17
    assert retry_after_s(" 9 ") == 9
    assert retry_after_s("999999999999") == MAX_RETRY_AFTER_S
    for nonsense in (None, "", "-5", "1.5", "soon", "१७"):
        assert retry_after_s(nonsense) is None
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=100)
    assert 90 < (retry_after_s(email.utils.format_datetime(soon, usegmt=True)) or 0) <= 100
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert of_response("m", 429, "0", b"").retry_after_s == 1
    assert of_response("m", 429, "17", b"").retry_after_s == 17
    assert of_response("m", 503, None, b"").retry_after_s == NoReplica.retry_after_s


def test_errors_within_a_stream() -> None:
    """By their code where it is a status; else they are the server's fault."""
    assert isinstance(of_event("m", b'{"code": 429}'), Busy)
    assert isinstance(of_event("m", b'{"code": 400, "message": "no"}'), BadRequest)
    for other in (b'{"code": "rate_limit"}', b'{"code": true}', b'{"code": 200}', b'"words"', b"{}", b"5"):
        assert isinstance(of_event("m", other), UpstreamFault)


def test_words_for_the_log_are_plain_names() -> None:
    """Anything that might be a text of somebody is none."""
    assert log_code(body(code="invalid_api_key")) == "invalid_api_key"
    assert log_code(body(code=None, type="server_error")) == "server_error"
    assert log_code(body(code="please tell", type="my secret is 5")) is None
    assert log_code(b"nothing") is None
