"""What another server says went wrong, as an error of ours. Pure.

    it says                        we say
    400 and other 4xx              400, in its words: the client's mistake stays the client's
    401, 403, 404                  502: our key or the catalogue is wrong, which is no client's business
    429                            429 with its Retry-After
    503                            503 with its Retry-After
    3xx, other 5xx, no sense       502

Its words reach a client only where they are about the client's request; they are cut and cleaned, and
never stand in a log: they may quote what a user wrote.
"""

from __future__ import annotations

import datetime
import email.utils

import msgspec

from antiphon.core.errors import AntiphonError, BadRequest, Busy, ContextTooLong, NoReplica, UpstreamFault

MAX_RETRY_AFTER_S = 3600.0
_NULL = msgspec.Raw(b"null")  # in a union msgspec would not see it
_MAX_WORDS = 500
_MAX_NAME = 64
_OURS = frozenset({401, 403, 404, 405, 407})  # what only the operator can mend


class _Body(msgspec.Struct, frozen=True):
    """OpenAI's envelope, and the flat one of older servers."""

    error: msgspec.Raw = _NULL
    message: object = None
    code: object = None


class _Words(msgspec.Struct, frozen=True):
    message: object = None
    type: object = None
    param: object = None
    code: object = None


_body = msgspec.json.Decoder(_Body)
_words = msgspec.json.Decoder(_Words)


def unreachable(model: str, retry_after_s: float | None = None) -> AntiphonError:
    """The server of this model does not take requests now."""
    error = NoReplica(
        f"The server behind the model {model!r} does not answer at the moment; try again shortly."
    )
    return _after(error, retry_after_s)


def senseless(model: str) -> UpstreamFault:
    """What it said cannot be understood, or must not be believed."""
    return UpstreamFault(f"The server behind the model {model!r} gave an answer that makes no sense.")


def too_slow(model: str) -> UpstreamFault:
    """It took the request and then said nothing for too long."""
    return UpstreamFault(f"The server behind the model {model!r} fell silent.")


def of_response(model: str, status: int, retry_after: str | None, body: bytes) -> AntiphonError:
    """The error of a response that is no success. `body`: as much of it as was read."""
    words = _read(body)
    return _error(model, status, words, retry_after_s(retry_after))


def of_event(model: str, error: bytes) -> AntiphonError:
    """The error of an error object within a stream that began as a success."""
    words = _read(b'{"error":' + error + b"}")
    code = words.code
    is_status = isinstance(code, int) and not isinstance(code, bool) and 400 <= code < 600
    return _error(model, code if is_status and isinstance(code, int) else 500, words, None)


def log_code(body: bytes) -> str | None:
    """The error's code or type, where it is a plain name: the only word of theirs for a log."""
    words = _read(body)
    for word in (words.code, words.type):
        if isinstance(word, str) and word.isascii() and word.replace("_", "").isalnum():
            return word[:_MAX_NAME]
    return None


def retry_after_s(header: str | None) -> float | None:
    """Seconds of a Retry-After header, given as seconds or as a date; None where it makes no sense."""
    if header is None:
        return None
    text = header.strip()
    if text.isascii() and text.isdigit():
        return min(float(text[:9]), MAX_RETRY_AFTER_S)
    try:
        when = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=datetime.UTC)
    left = (when - datetime.datetime.now(datetime.UTC)).total_seconds()
    return min(max(left, 0.0), MAX_RETRY_AFTER_S)


def _error(model: str, status: int, words: _Words, retry_s: float | None) -> AntiphonError:
    if status == 429:
        busy = Busy(f"The server behind the model {model!r} is busy; try again shortly.")
        return _after(busy, retry_s)
    if status == 503:
        return unreachable(model, retry_s)
    if status in _OURS or not 400 <= status < 500:
        return UpstreamFault(f"The server behind the model {model!r} failed to answer.")
    message = _clean(words.message) or f"The server behind the model {model!r} refused this request."
    param = _clean(words.param)[:_MAX_NAME] or None
    if words.code == ContextTooLong.code or "exceed_context_size" in _clean(words.type):
        return ContextTooLong(message, param=param or "messages")
    return BadRequest(message, param=param)


def _after(error: AntiphonError, seconds: float | None) -> AntiphonError:
    if seconds is not None:
        error.retry_after_s = max(seconds, 1.0)
    return error


def _read(body: bytes) -> _Words:
    try:
        envelope = _body.decode(body)
        raw = bytes(envelope.error)
        if raw == bytes(_NULL):
            return _Words(envelope.message, None, None, envelope.code)
        return _Words(msgspec.json.decode(raw, type=str)) if raw.startswith(b'"') else _words.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Words()


def _clean(word: object) -> str:
    text = word[:_MAX_WORDS] if isinstance(word, str) else ""
    return "".join(character if character.isprintable() else " " for character in text).strip()
