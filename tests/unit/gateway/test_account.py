"""Whoever waits for a request's end hears of it once, whatever happens."""

from __future__ import annotations

import pytest
import structlog

from antiphon.gateway.account import Account
from antiphon.obs.metrics import GatewayMetrics


def test_all_who_wait_hear_of_the_end_once_and_last_first() -> None:
    """Also where one of them fails: what it held is its own fault, what the others hold is given back."""
    account = Account("POST", None)
    heard: list[str] = []

    def fail() -> None:
        heard.append("faulty")
        raise ZeroDivisionError

    account.at_close(lambda: heard.append("first"))
    account.at_close(fail)
    account.at_close(lambda: heard.append("last"))
    with pytest.raises(ZeroDivisionError):
        account.close(structlog.get_logger(), GatewayMetrics())
    assert heard == ["last", "faulty", "first"]
    account.close(structlog.get_logger(), GatewayMetrics())
    assert len(heard) == 3
