"""Classes and times of requests: what headers, bodies and keys say together."""

from __future__ import annotations

import pytest

from antiphon.core.errors import BadRequest
from antiphon.core.generation import Priority
from antiphon.core.grant import Grant
from antiphon.gateway.schema import ChatRequest, CompletionRequest, Message
from antiphon.gateway.urgency import priority_of, tier_name, timeout_of

URGENT, USUAL, BATCH = Priority.INTERACTIVE, Priority.DEFAULT, Priority.BATCH


def chat(tier: str | None = None) -> ChatRequest:
    return ChatRequest(model="m", messages=[Message("user", "hi")], service_tier=tier)


def said(**headers: str) -> list[tuple[bytes, bytes]]:
    return [(f"x-antiphon-{name}".encode(), value.encode()) for name, value in headers.items()]


@pytest.mark.parametrize("key", Priority)
@pytest.mark.parametrize("header", [None, "interactive", "default", "batch", " Batch "])
@pytest.mark.parametrize("tier", [None, "auto", "default", "flex", "priority", "whatever"])
def test_nothing_a_client_says_raises_its_class(key: Priority, header: str | None, tier: str | None) -> None:
    """The class is the key's or a less urgent one, and the least urgent of all that was said."""
    headers = said() if header is None else said(**{"class": header})
    found = priority_of(headers, chat(tier), Grant(priority=key))
    wishes = [key]
    if header is not None:
        wishes.append(Priority[header.strip().upper()])
    if tier == "flex":
        wishes.append(BATCH)
    assert found is max(wishes)


def test_completions_have_no_tier() -> None:
    """Only the header lowers them."""
    request = CompletionRequest(model="m", prompt="hi")
    assert priority_of(said(), request, Grant(priority=URGENT)) is URGENT
    assert priority_of(said(**{"class": "batch"}), request, Grant()) is BATCH


@pytest.mark.parametrize("value", ["", "urgent", "0", "interactive,batch", "__class__"])
def test_an_unknown_class_is_a_mistake(value: str) -> None:
    """Told, not guessed; the client's words are not repeated."""
    with pytest.raises(BadRequest) as caught:
        priority_of(said(**{"class": value}), chat(), Grant())
    assert caught.value.param == "x-antiphon-class"
    assert "urgent" not in caught.value.message


def test_a_time_is_never_more_than_the_gateways() -> None:
    """Seconds, decimal; none said: all there is."""
    assert timeout_of(said(), 600.0) == 600.0
    assert timeout_of(said(timeout="2.5"), 600.0) == 2.5
    assert timeout_of(said(timeout="0.001"), 600.0) == 0.001
    assert timeout_of(said(timeout="999999999"), 600.0) == 600.0


@pytest.mark.parametrize(
    "value", ["", "0", "0.0", "-1", "nan", "inf", "1e3", "5s", "1,5", "+5", "٣", ".5", "1" * 400]
)
def test_a_malformed_time_is_a_mistake(value: str) -> None:
    """No guess at what was meant."""
    with pytest.raises(BadRequest) as caught:
        timeout_of(said(timeout=value), 600.0)
    assert caught.value.param == "x-antiphon-timeout"


@pytest.mark.parametrize("name", ["class", "timeout"])
def test_a_header_that_stands_twice_is_a_mistake(name: str) -> None:
    """Which one counts would be anybody's guess."""
    value = {"class": "batch", "timeout": "5"}[name]
    headers = said(**{name: value}) * 2
    with pytest.raises(BadRequest):
        priority_of(headers, chat(), Grant())
        timeout_of(headers, 600.0)


def test_the_tier_that_was_got_is_told() -> None:
    """In OpenAI's words; a wish that was not granted is "default"."""
    assert tier_name("priority", URGENT) == "priority"
    assert tier_name("priority", USUAL) == "default"
    assert tier_name("flex", BATCH) == "flex"
    assert tier_name("auto", URGENT) == "default"
