"""Errors as clients see them, the account of a request, and the API's document."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from antiphon.core import errors as core_errors
from antiphon.core.errors import AntiphonError, MethodNotAllowed, StoreUnavailable
from antiphon.core.generation import CachedTokens, StepOutput, Terminal
from antiphon.gateway.account import Account, account_of, open_account
from antiphon.gateway.errors import of_output, response_of
from antiphon.gateway.openapi import OPERATIONS, openapi_document
from antiphon.gateway.schema import ChatRequest
from antiphon.obs.metrics import GatewayMetrics
from support.lines import Lines

ALL = [
    value
    for value in vars(core_errors).values()
    if isinstance(value, type) and issubclass(value, AntiphonError)
]


def raised(kind: type[AntiphonError]) -> AntiphonError:
    own = {MethodNotAllowed: {"allow": "POST"}, StoreUnavailable: {"detail": "for the operator"}}
    return kind("words", **own.get(kind, {"param": "p"}))


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_has_a_whole_envelope(kind: type[AntiphonError]) -> None:
    """All four keys, the right status, and Retry-After where coming again helps."""
    error = raised(kind)
    response = response_of(error)
    body = json.loads(bytes(response.body))
    assert response.status_code == error.status
    assert response.media_type == "application/json"
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] == "words"
    assert isinstance(body["error"]["type"], str)
    assert ("retry-after" in response.headers) == (error.status in (429, 503))
    assert response.headers.get("allow") == ("POST" if error.status == 405 else None)


def test_only_good_ends_have_no_error() -> None:
    """Each way an answer can end is either a finish reason or an error."""
    good = {Terminal.STOP, Terminal.LENGTH, Terminal.TOOL_CALLS, Terminal.CONTENT_FILTER}
    assert {finish for finish in Terminal if of_output(finish, None) is None} == good


REFUSALS = [
    ("context_length_exceeded: Too long.", 400, "context_length_exceeded", "Too long."),
    ("invalid_value: No: never.", 400, "invalid_value", "No: never."),
    ("rate_limit_exceeded: Full.", 429, "rate_limit_exceeded", "Full."),
    ("no_replica: Stopping.", 503, "no_replica", "Stopping."),
]


@pytest.mark.parametrize(("detail", "status", "code", "message"), REFUSALS)
def test_a_workers_refusal_keeps_its_words(detail: str, status: int, code: str, message: str) -> None:
    """They are ours: the worker refuses with the errors of the same tree."""
    error = of_output(Terminal.REFUSED, detail)
    assert error is not None
    assert (error.status, error.code, error.message) == (status, code, message)


@pytest.mark.parametrize("detail", [None, "", "Traceback: /home/x", "invalid_api_key: y"])
def test_other_words_of_a_worker_stay_here(detail: str | None) -> None:
    """What is not one of the known refusals says nothing to the client."""
    error = of_output(Terminal.REFUSED, detail)
    assert error is not None
    assert (error.status, error.code) == (500, "engine_fault")
    assert "home" not in error.message


def scope(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http", "method": "POST", "headers": list(headers)}


def test_ids_are_made_here() -> None:
    """The client's id is a label, cut and printable; two requests never share ours."""
    first, second = (open_account(scope((b"x-request-id", b"mine\x1b[31m" + b"x" * 500))) for _ in range(2))
    assert first.request_id != second.request_id
    assert first.client_label is not None
    assert first.client_label.startswith("mine?")
    assert len(first.client_label) <= 64
    assert first.client_label.isprintable()


def test_the_account_stays_with_its_request() -> None:
    """What was opened is what later steps find."""
    one = scope()
    account = open_account(one)
    assert account_of(one) is account


def closed(account: Account) -> tuple[dict[str, Any], dict[str, float]]:
    """The account's log line and metrics."""
    lines, metrics = Lines(), GatewayMetrics()
    account.close(lines.logger(), metrics)
    families = text_string_to_metric_families(metrics.render().decode())
    samples = {s.name: s.value for family in families for s in family.samples if "le" not in s.labels}
    return lines.named("request.finished")[0], samples


def test_one_line_says_it_all(account: Account) -> None:
    """Tokens in, out and cached, queue, TTFT, TPOT, finish."""
    account.route, account.status, account.model = "/v1/chat/completions", 200, "m"
    account.num_prompt_tokens = 7
    account.count_output(StepOutput("g", 0, 0, [1], None, None, CachedTokens(2, 1, 1), None, 0.5))
    account.count_output(StepOutput("g", 0, 1, [2, 3], None))
    account.finishes.append(Terminal.STOP)
    line, samples = closed(account)
    assert (line["tokens_in"], line["tokens_cached"], line["tokens_out"]) == (7, 4, 3)
    assert (line["queue_s"], line["finish"], line["status"]) == (0.5, "stop", 200)
    assert line["ttft_s"] >= 0
    assert line["tpot_s"] >= 0
    assert line["request_id"] == account.request_id
    assert samples["antiphon_prompt_tokens_total"] == 7
    assert samples["antiphon_cached_prompt_tokens_total"] == 4
    assert samples["antiphon_generation_tokens_total"] == 3
    assert samples["antiphon_time_to_first_token_seconds_count"] == 1
    assert samples["antiphon_time_per_output_token_seconds_count"] == 1
    assert samples["antiphon_e2e_request_latency_seconds_count"] == 1


def test_a_client_that_left_is_booked_as_such(account: Account) -> None:
    """Whatever status had been begun."""
    account.status, account.is_client_gone = 200, True
    line, _ = closed(account)
    assert line["status"] == 499


def test_health_checks_are_quiet(account: Account) -> None:
    """Machines ask every few seconds; their lines are for debugging."""
    account.route, account.status = "/health", 200
    line, _ = closed(account)
    assert line["level"] == "debug"


@given(st.lists(st.text(max_size=20), max_size=20))
def test_metrics_do_not_grow_with_what_clients_send(texts: list[str]) -> None:
    """Routes and models that are not ours never become labels."""
    metrics = GatewayMetrics()
    for text in texts:
        account = Account("POST", text)
        account.status, account.error_code = 404, "model_not_found"
        account.close(Lines().logger(), metrics)
    families = text_string_to_metric_families(metrics.render().decode())
    (requests,) = [family for family in families if family.name == "antiphon_http_requests"]
    assert {sample.labels["route"] for sample in requests.samples} <= {"other"}


def test_the_document_covers_the_routes() -> None:
    """Each operation has a success and, for all other statuses, the envelope; references resolve."""
    document = openapi_document()
    for operation in OPERATIONS:
        responses = document["paths"][operation.path][operation.method]["responses"]
        assert set(responses) == {"200", "default"}
        schema = responses["default"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ErrorResponse"}
    text = json.dumps(document)
    for part in text.split('"$ref": "#/components/schemas/')[1:]:
        assert part.split('"')[0] in document["components"]["schemas"]


def test_the_document_says_where_keys_go() -> None:
    """A bearer key or none, everywhere but where it never matters."""
    document = openapi_document()
    assert document["security"] == [{}, {"key": []}]
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    own = {path for path, methods in document["paths"].items() for o in methods.values() if "security" in o}
    assert own == {"/health"}
    assert document["paths"]["/health"]["get"]["security"] == []


def test_the_document_says_what_the_decoder_enforces() -> None:
    """Bounds in the schema are the bounds of the struct."""
    schema = openapi_document()["components"]["schemas"]["ChatRequest"]
    assert set(schema["required"]) == {"model", "messages"}
    assert set(schema["properties"]) == set(ChatRequest.__struct_fields__)
    n = next(option for option in schema["properties"]["n"]["anyOf"] if option.get("type") == "integer")
    assert (n["minimum"], n["maximum"]) == (1, 128)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"model":"m","messages":[{"role":"user"}],"n":129}', type=ChatRequest)
