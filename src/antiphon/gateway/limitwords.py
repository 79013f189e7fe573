"""What a limited caller is told: headers as OpenAI has them, and the error of a request refused. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from antiphon.core.errors import Busy
from antiphon.core.grant import Limits
from antiphon.core.metering import Breach, Left, LimitKind, Standing, left_of

RATE_LIMIT = "rejected-rate-limit"
CONCURRENCY = "rejected-concurrency"
QUOTA = "rejected-quota"

_WORDS = {
    LimitKind.REQUESTS: ("requests per minute", RATE_LIMIT),
    LimitKind.TOKENS: ("tokens per minute", RATE_LIMIT),
    LimitKind.CONCURRENT: ("requests at once", CONCURRENCY),
    LimitKind.DAY: ("tokens per day", QUOTA),
    LimitKind.MONTH: ("tokens per month", QUOTA),
    LimitKind.TOTAL: ("tokens of this client token", QUOTA),
}


def refusal(breach: Breach) -> Busy:
    """The error of a request that would exceed a limit."""
    name, reason = _WORDS[breach.kind]
    if breach.kind is LimitKind.TOKENS and breach.wait_s is None:
        return _busy(
            f"Request too large on {name}: limit {breach.limit}, requested {breach.needed}. "
            "Send less, or ask for a shorter answer.",
            reason,
            None,
        )
    if reason is QUOTA:
        error = _busy(
            f"You exceeded your quota on {name}: limit {breach.limit}, used {breach.used}, requested "
            f"{breach.needed}.{_when(breach.wait_s)}",
            reason,
            breach.wait_s,
        )
        error.code = error.type = "insufficient_quota"
        return error
    return _busy(
        f"Rate limit reached on {name}: limit {breach.limit}, used {breach.used}, requested {breach.needed}."
        f"{_when(breach.wait_s)}",
        reason,
        breach.wait_s,
    )


def limit_headers(limits: Limits, standing: Standing) -> Iterator[tuple[bytes, bytes]]:
    """How much is left in this minute, of what is limited."""
    windows = (
        (b"requests", limits.requests_per_minute, standing.requests),
        (b"tokens", limits.tokens_per_minute, standing.tokens),
    )
    for name, limit, slots in windows:
        if limit is not None:
            left: Left = left_of(limit, slots, standing.now_s)
            yield b"x-ratelimit-limit-" + name, str(left.limit).encode()
            yield b"x-ratelimit-remaining-" + name, str(left.remaining).encode()
            yield b"x-ratelimit-reset-" + name, duration(left.reset_s).encode()


def duration(seconds: float) -> str:
    """As OpenAI writes it: `120ms`, `8.5s`, `6m0s`, `1h0m0s`."""
    millis = max(round(seconds * 1000), 0)
    if millis < 1000:
        return f"{millis}ms"
    minutes, millis = divmod(millis, 60_000)
    rest = f"{millis / 1000:g}s"
    if not minutes:
        return rest
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}" if hours else f"{minutes}m{rest}"


def _when(wait_s: float | None) -> str:
    return "" if wait_s is None else f" Please try again in {duration(wait_s)}."


def _busy(message: str, reason: str, wait_s: float | None) -> Busy:
    error = Busy(message)
    error.dropped_reason, error.retry_after_s = reason, wait_s
    return error
