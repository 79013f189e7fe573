"""What can go wrong, said once.

    AntiphonError
    ├── BadRequest            400  the client's input is wrong; `param` names the field
    │   └── ContextTooLong    400  the prompt does not fit the model's context
    ├── Unauthorized          401  no or wrong key
    ├── Forbidden             403  a good key, but not for this
    ├── NotFound              404  unknown model, route or id
    ├── MethodNotAllowed      405
    ├── RequestTimeout        408  the client was too slow in sending its body
    ├── BodyTooLarge          413
    ├── UnsupportedMedia      415
    ├── Busy                  429  a queue is full: come again (Retry-After)
    ├── EngineFault           500  the model step failed
    ├── UpstreamFault         502  a server that answers for us refused us, or what it said made no sense
    ├── NoReplica             503  nobody serves this model now (Retry-After)
    ├── WorkerLost            503  the worker died before the answer's end
    ├── Quarantined           422  workers died of requests like this one: it is not tried for a while
    ├── StoreUnavailable      503  the database does not answer (Retry-After); `detail` is for the operator
    └── DeadlineExceeded      504  the request's time ran out

Raised where the fault is known, translated to HTTP in one place (gateway/errors.py). Messages are
written for the person who can mend it and never hold paths, addresses or text of other users.
"""

from __future__ import annotations


class AntiphonError(Exception):
    """Base of all errors a client may see."""

    status = 500
    type = "server_error"
    code: str | None = None
    retry_after_s: float | None = None
    dropped_reason: str | None = None  # rejected-*: nothing was computed; evicted-*: work is lost

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class BadRequest(AntiphonError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextTooLong(BadRequest):
    code = "context_length_exceeded"


class Unauthorized(AntiphonError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class Forbidden(AntiphonError):
    status = 403
    type = "permission_error"
    code = "permission_denied"


class NotFound(AntiphonError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(AntiphonError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow  # methods that work, as the Allow header names them


class RequestTimeout(AntiphonError):
    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class BodyTooLarge(AntiphonError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UnsupportedMedia(AntiphonError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class Busy(AntiphonError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retry_after_s: float | None = 1.0


class EngineFault(AntiphonError):
    status = 500
    code = "engine_fault"


class UpstreamFault(AntiphonError):
    status = 502
    code = "upstream_fault"


class NoReplica(AntiphonError):
    status = 503
    type = "service_unavailable"
    code = "no_replica"
    retry_after_s = 2.0


class WorkerLost(AntiphonError):
    status = 503
    type = "service_unavailable"
    code = "worker_lost"
    retry_after_s = 1.0


class Quarantined(AntiphonError):
    status = 422  # not 503: clients would send it again
    type = "invalid_request_error"
    code = "request_quarantined"


class StoreUnavailable(AntiphonError):
    status = 503
    type = "service_unavailable"
    code = "store_unavailable"
    retry_after_s = 2.0

    def __init__(self, message: str, *, detail: str) -> None:
        super().__init__(message)
        self.detail = detail  # what the database said, for the operator's eyes only


class DeadlineExceeded(AntiphonError):
    status = 504
    type = "server_error"
    code = "deadline_exceeded"


def refusal_of(error: AntiphonError) -> str:
    """An error as an output carries it: its code, how long to wait, its message."""
    wait = "" if error.retry_after_s is None else f";{error.retry_after_s:g}"
    return f"{error.code}{wait}: {error.message}"
