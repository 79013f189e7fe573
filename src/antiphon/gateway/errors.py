"""The one place where an error becomes OpenAI's envelope.

`{"error": {"message", "type", "param", "code"}}`, all four keys on every path: unknown routes,
bad JSON, faults of ours, and the error event inside a stream. What is not one of ours says nothing
about itself to the client; the log has it under the request id.
"""

from __future__ import annotations

import math

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from antiphon.core.errors import (
    AntiphonError,
    BadRequest,
    Busy,
    ContextTooLong,
    DeadlineExceeded,
    EngineFault,
    MethodNotAllowed,
    NoReplica,
    NotFound,
    Quarantined,
    Unauthorized,
    UpstreamFault,
    WorkerLost,
)
from antiphon.core.generation import Terminal
from antiphon.gateway.reply import ErrorBody, ErrorResponse

_MAX_SHOWN = 80
_MOST_PATIENCE_S = 60.0  # of SDKs for a Retry-After
_REFUSALS: dict[str, type[AntiphonError]] = {
    str(kind.code): kind for kind in (BadRequest, ContextTooLong, Busy, NoReplica, UpstreamFault, Quarantined)
}


def envelope(error: AntiphonError) -> ErrorResponse:
    """The body a client sees."""
    return ErrorResponse(ErrorBody(error.message, error.type, error.param, error.code))


def response_of(error: AntiphonError) -> Response:
    """The HTTP answer to a request that failed before its first byte."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if isinstance(error, Busy) and (error.retry_after_s is None or error.retry_after_s > _MOST_PATIENCE_S):
        headers["x-should-retry"] = "false"  # SDKs would try again within seconds all the same
    if error.dropped_reason is not None:
        headers["x-antiphon-dropped-reason"] = error.dropped_reason
    if error.status == 413 or error.status == 408:
        headers["connection"] = "close"  # the rest of the body is not read
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = error.allow
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    body = msgspec.json.encode(envelope(error))
    return Response(body, error.status, headers, media_type="application/json")


def internal_error() -> AntiphonError:
    """What a client hears of a fault of ours."""
    return AntiphonError(
        "The server had an error while processing your request. Its log knows more under the request id.",
        code="internal_error",
    )


def of_output(finish: Terminal, detail: str | None) -> AntiphonError | None:
    """The error in which an answer that ended like this ends for its client; None where it ended well.

    `detail` is the worker's word on it: for the log, except where it refuses, which it does in ours.
    """
    match finish:
        case Terminal.STOP | Terminal.LENGTH | Terminal.TOOL_CALLS | Terminal.CONTENT_FILTER:
            return None
        case Terminal.LOST:
            return _evicted(
                WorkerLost("The worker that computed this answer was lost. Please try again."), "worker-lost"
            )
        case Terminal.ERROR:
            return EngineFault("The model step that computed this answer failed. Please try again.")
        case Terminal.DEADLINE:
            return _evicted(
                DeadlineExceeded("The answer was not complete before the request's time ran out."), "expired"
            )
        case Terminal.ABORTED:
            return _evicted(
                WorkerLost("The answer was ended early by the server. Please try again."), "stopping"
            )
        case Terminal.REFUSED:
            return _refusal(detail or "")


def _evicted(error: AntiphonError, reason: str) -> AntiphonError:
    error.dropped_reason = f"evicted-{reason}"
    return error


def _refusal(detail: str) -> AntiphonError:
    head, _, message = detail.partition(": ")
    code, _, wait = head.partition(";")
    kind = _REFUSALS.get(code)
    if kind is None:
        return EngineFault("The worker could not take this request. Please try again.")
    error = kind(message, code=code)
    if wait:
        error.retry_after_s = float(wait)
    return error


def raise_ours(request: Request, error: Exception) -> Response:
    """Starlette's own errors (no route, wrong method) as ours; the error middleware answers them."""
    if not isinstance(error, HTTPException):
        raise error
    raise _translate(request.scope, error) from None


def _translate(scope: Scope, error: HTTPException) -> AntiphonError:
    url = f"{scope['method'][:_MAX_SHOWN]} {scope['path'][:_MAX_SHOWN]}"
    match error.status_code:
        case 404:
            return NotFound(f"Unknown request URL: {url}.", code="unknown_url")
        case 405:
            allow = (error.headers or {}).get("Allow", "")
            return MethodNotAllowed(f"Not allowed: {url}. Use {allow}.", allow=allow)
        case _:
            return BadRequest("The request could not be understood.")
