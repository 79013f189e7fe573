"""How `bench limits` compares books with what clients got, and what it counts as beyond a limit."""

from __future__ import annotations

import datetime
import json

import pytest
from bench.client import LEFT, Answer
from bench.limits_border import Border, BorderSettings
from bench.limits_cost import KEYED, KEYLESS, LIMITED, Costs
from bench.limits_usage import Books, Got, UsageSettings, _request
from bench.report import Figure

from antiphon.store.usage import LOST
from antiphon.store.usagereport import UsageRecord

NOW = datetime.datetime(2026, 12, 1, tzinfo=datetime.UTC)


def row(request_id: str, answer_tokens: int, outcome: str | None = "ok", **fields: object) -> UsageRecord:
    """A row that has ended, unless it is open."""
    return UsageRecord(
        id=request_id,
        tenant="acme",
        key_id="key_1",
        client_token_id=None,
        gateway_id="gw",
        model="m",
        endpoint="/v1/completions",
        opened_at=NOW,
        closed_at=None if outcome is None else NOW,
        outcome=outcome,
        status=200,
        prompt_tokens=1,
        cached_tokens=0,
        answer_tokens=answer_tokens,
        cost_micros=0,
        currency=None,
        is_estimated=outcome == LOST if "is_estimated" not in fields else bool(fields["is_estimated"]),
    )


def got(request_id: str, num_tokens: int, fault: str | None = None, status: int = 200) -> Got:
    return Got(request_id, status, fault, num_tokens, is_of_killed=False)


def values(figures: list[Figure]) -> dict[str, float | None]:
    return {figure.name: figure.value for figure in figures}


def books(rows: list[UsageRecord], *clients: Got) -> dict[str, float | None]:
    return values(Books(clients, {one.id: one for one in rows}).figures())


def test_tokens_are_counted_in_what_was_read() -> None:
    """Over all choices of all events, streamed or whole, of either endpoint."""
    answer = Answer(0.0, status=200, headers={b"x-request-id": b"req_1"})
    answer.events = [
        json.dumps(event).encode()
        for event in (
            {"choices": [{"delta": {"role": "assistant"}}, {"delta": {"content": "ab"}}]},
            {"choices": [{"text": "c"}, {"message": {"content": "def"}}]},
            {"choices": [], "usage": {"completion_tokens": 99}},
        )
    ]
    assert Got.of(answer, is_of_killed=False) == got("req_1", 6)


def test_books_that_add_up() -> None:
    """Equal where the answer ended; more, where the client hung up, is what was on the wire."""
    found = books([row("a", 5), row("b", 9, "client_gone")], got("a", 5), got("b", 6, LEFT))
    assert found == {
        "usage_off": 0,
        "usage_rows_wrong": 0,
        "usage_rows_missing": 0,
        "usage_rows_open": 0,
        "usage_unread": 0.5,
    }


@pytest.mark.parametrize(
    ("figure", "rows", "client"),
    [
        ("usage_off", [row("a", 4)], got("a", 5)),
        ("usage_rows_wrong", [row("a", 6)], got("a", 5)),
        ("usage_rows_wrong", [row("a", 5, "client_gone")], got("a", 6, LEFT)),
        ("usage_rows_wrong", [row("a", 7, "engine_fault")], got("a", 6, "error event")),
        ("usage_rows_missing", [], got("a", 5)),
        ("usage_rows_open", [row("a", 5, None)], got("a", 5)),
        ("usage_rows_open", [row("a", 0, LOST, is_estimated=False)], got("a", 5)),
    ],
)
def test_books_that_do_not(figure: str, rows: list[UsageRecord], client: Got) -> None:
    """Each way of being wrong shows."""
    assert books(rows, client)[figure] == 1


def test_rows_of_a_killed_gateway_are_marked_and_compared_with_nothing() -> None:
    """What they lack is listed."""
    made = Books((got("a", 5), got("", 0, "refused", 0)), {"a": row("a", 0, LOST)})
    assert not any(values(made.figures()).values())
    assert made.row()["rows marked lost"] == 1
    assert made.row()["answer tokens that those lack"] == 5


def test_kinds_of_requests_differ_and_repeat() -> None:
    """Streams and whole answers, both endpoints, several choices, clients that hang up."""
    requests = [_request(UsageSettings(), number) for number in range(200)]
    assert requests == [_request(UsageSettings(), number) for number in range(200)]
    bodies = [json.loads(request.body) for request in requests]
    assert {request.path for request in requests} == {"/v1/chat/completions", "/v1/completions"}
    assert {body.get("stream", False) for body in bodies} == {True, False}
    assert {body["n"] for body in bodies} == {1, 2, 3}
    leaving = [body for request, body in zip(requests, bodies, strict=True) if request.leaves_after]
    assert leaving
    assert all(body["stream"] for body in leaving)


def test_what_passes_beyond_a_limit_is_the_overrun() -> None:
    """The worst round; tokens in calls."""
    settings = BorderSettings(requests_per_minute=60, tokens_per_minute=3000)
    assert values(Border(settings, [58, 60], [2976, 3000]).figures()) == {"rpm_overrun": 0, "tpm_overrun": 0}
    found = values(Border(settings, [60, 63], [3096, 2976]).figures())
    assert found == {"rpm_overrun": 3, "tpm_overrun": 2}


def test_limits_cost_what_a_limited_key_costs_more_round_by_round() -> None:
    """A round in which everything was slow does not count more."""
    costs = Costs({KEYLESS: [1.0, 5.0, 1.0], KEYED: [1.1, 5.1, 1.1], LIMITED: [1.2, 5.3, 1.2]}, 0.05, 0.3)
    found = values(costs.figures())
    assert found["cost_limits_ms"] == pytest.approx(0.2)
    assert found["cost_ms"] == pytest.approx(0.25)
