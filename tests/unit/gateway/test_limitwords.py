"""Headers and errors in OpenAI's form."""

from __future__ import annotations

import pytest

from antiphon.core.grant import Limits
from antiphon.core.metering import Breach, LimitKind, Standing
from antiphon.gateway.limitwords import duration, limit_headers, refusal


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.0004, "0ms"),
        (0.12, "120ms"),
        (0.9996, "1s"),
        (8.5, "8.5s"),
        (60.0, "1m0s"),
        (360.0, "6m0s"),
        (3661.25, "1h1m1.25s"),
        (86400.0, "24h0m0s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    """Clients parse them."""
    assert duration(seconds) == text


def test_headers_name_what_is_limited_only() -> None:
    """Six for both, none for none."""
    standing = Standing(now_s=2.0, requests={0: 3}, tokens={0: 40})
    both = dict(limit_headers(Limits(requests_per_minute=10, tokens_per_minute=30), standing))
    assert both == {
        b"x-ratelimit-limit-requests": b"10",
        b"x-ratelimit-remaining-requests": b"7",
        b"x-ratelimit-reset-requests": b"1m3s",
        b"x-ratelimit-limit-tokens": b"30",
        b"x-ratelimit-remaining-tokens": b"0",
        b"x-ratelimit-reset-tokens": b"1m3s",
    }
    assert not dict(limit_headers(Limits(tokens_per_day=5), standing))


@pytest.mark.parametrize("kind", LimitKind)
def test_refusals_say_which_limit_and_when(kind: LimitKind) -> None:
    """Each is a 429 with numbers, a reason and an honest wait."""
    error = refusal(Breach(kind, limit=10, used=9, needed=5, wait_s=12.5))
    assert error.status == 429
    assert error.retry_after_s == 12.5
    assert (error.dropped_reason or "").startswith("rejected-")
    assert "limit 10, used 9, requested 5" in error.message
    assert "try again in 12.5s" in error.message
    is_quota = kind in (LimitKind.DAY, LimitKind.MONTH, LimitKind.TOTAL)
    assert error.code == ("insufficient_quota" if is_quota else "rate_limit_exceeded")


def test_what_can_never_pass_is_told_so() -> None:
    """No wait is promised that would not help."""
    large = refusal(Breach(LimitKind.TOKENS, limit=10, used=0, needed=50, wait_s=None))
    assert "too large" in large.message
    spent = refusal(Breach(LimitKind.TOTAL, limit=10, used=10, needed=5, wait_s=None))
    assert (large.retry_after_s, spent.retry_after_s) == (None, None)
