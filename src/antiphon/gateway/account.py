"""The account of one HTTP request: who, when, how many tokens, how it ended.

Made when the request arrives, filled by whoever knows, closed exactly once on every way out: then
it becomes one log line and the metrics. Holds no text of prompt or answer.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack

from starlette.types import Scope

from antiphon.core.generation import KvReport, Priority, StepOutput, Terminal
from antiphon.gateway.callers import Caller
from antiphon.gateway.reply import PromptTokensDetails, Usage
from antiphon.obs.log import Logger
from antiphon.obs.metrics import GatewayMetrics
from antiphon.router.answer import Answer

_KEY = "antiphon.account"
_MAX_LABEL = 64
_QUIET = frozenset({"/health", "/metrics"})  # asked for by machines, every few seconds
CLIENT_GONE = 499  # for log and metrics only: nobody is there to read a status


class Account:
    """Times are seconds of the monotonic clock."""

    def __init__(self, method: str, client_label: str | None) -> None:
        self.request_id = f"req_{secrets.token_hex(16)}"
        self.client_label = client_label  # the client's own x-request-id: shown in the log, never trusted
        self.method = method
        self.caller: Caller | None = None  # None: not asked for, or not known
        self.route = "other"
        self.status: int | None = None  # of the response that was begun
        self.accepted_s = time.perf_counter()
        self.is_stream = False
        self.is_client_gone = False
        self.error_code: str | None = None
        self.dropped_reason: str | None = None
        self.model: str | None = None
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_answer_tokens = 0
        self.priority = Priority.DEFAULT
        self.timeout_s = math.inf  # for all of it
        self.waited_s: float | None = None  # for a place; None: it needed none, or was refused at once
        self.queued_s: float | None = None
        self.kv: KvReport | None = None  # of the first prompt that had one
        self.answers: Sequence[Answer] = ()  # what was started for it
        self.finishes: list[Terminal] = []
        self.passed_over: list[str] = []  # models that were asked before and did not answer
        self.is_usage_estimated = False
        self.headers: list[tuple[bytes, bytes]] = []  # for the response, from whoever has something to say
        self.before_answer: Callable[[], Awaitable[None]] | None = None  # first byte of a success; may raise
        self._at_close = ExitStack()
        self._first_token_s: float | None = None
        self._last_token_s = 0.0

    @property
    def told_route(self) -> str:
        """Which workers it was sent to, why, and what that was expected to cost; empty: to none."""
        return " | ".join(answer.route for answer in self.answers if answer.route)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.accepted_s

    @property
    def left_s(self) -> float:
        """Of its time."""
        return max(self.timeout_s - self.elapsed_s, 0.0)

    def at_close(self, callback: Callable[[], None]) -> None:
        """Call this once, when the request has ended in whatever way; last registered, first called."""
        self._at_close.callback(callback)

    def ask(self, model: str) -> None:
        """This model is asked to answer: what is counted from now on is its."""
        self.model = model
        self.num_prompt_tokens = self.num_cached_tokens = self.num_answer_tokens = 0
        self.answers = ()
        self.finishes.clear()

    def count_output(self, output: StepOutput) -> None:
        """Take note of what the worker says of the prompt, and of answer tokens that the client gets."""
        if output.cached is not None and output.choice == 0:
            self.num_cached_tokens += output.cached.total
        if output.queued_s is not None and self.queued_s is None:
            self.queued_s = output.queued_s
        if output.kv is not None and self.kv is None:
            self.kv = output.kv
        if output.ids:
            self.count_tokens(len(output.ids))

    def count_tokens(self, num_tokens: int) -> None:
        """So many tokens of an answer came, just now."""
        self.num_answer_tokens += num_tokens
        self._last_token_s = time.perf_counter()
        if self._first_token_s is None:
            self._first_token_s = self._last_token_s

    def usage(self) -> Usage:
        """Tokens as the client is told."""
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_answer_tokens,
            total_tokens=self.num_prompt_tokens + self.num_answer_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.num_cached_tokens),
        )

    @property
    def is_charged(self) -> bool:
        """Whether what was counted is its client's to pay for: not where it failed before anything of a
        success had left, nor where the client left before the work began.
        """
        if self.is_client_gone and self.status is None:
            return bool(self.answers) or self.num_answer_tokens > 0
        return self.status is not None and self.status < 400

    @property
    def ttft_s(self) -> float | None:
        return None if self._first_token_s is None else self._first_token_s - self.accepted_s

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between tokens: of one answer, or between those of all choices together."""
        if self._first_token_s is None or self.num_answer_tokens < 2:
            return None
        return (self._last_token_s - self._first_token_s) / (self.num_answer_tokens - 1)

    def close(self, log: Logger, metrics: GatewayMetrics) -> None:
        """Book it, and call back whoever waits for its end."""
        with self._at_close:  # all are called, also where one of them fails
            self._book(log, metrics)

    def _book(self, log: Logger, metrics: GatewayMetrics) -> None:
        status = CLIENT_GONE if self.is_client_gone else self.status
        e2e_s = self.elapsed_s
        metrics.requests.labels(self.route, str(status)).inc()
        fields: dict[str, object] = {
            "request_id": self.request_id,
            "client_request_id": self.client_label,
            "method": self.method,
            "route": self.route,
            "status": status,
            "e2e_s": round(e2e_s, 6),
            "error": self.error_code,
            "dropped": self.dropped_reason,
            "tenant": None if self.caller is None else self.caller.tenant,
            "key": None if self.caller is None else self.caller.key_id,
            "token": None if self.caller is None or self.caller.token is None else self.caller.token.id,
            "user": None if self.caller is None else self.caller.end_user,
        }
        if self.model is not None:
            self._observe(metrics, self.model, e2e_s)
            fields |= {
                "model": self.model,
                "passed_over": ",".join(self.passed_over) or None,
                "usage_estimated": self.is_usage_estimated or None,
                "stream": self.is_stream,
                "tokens_in": self.num_prompt_tokens,
                "tokens_cached": self.num_cached_tokens,
                "kv": None if self.kv is None else str(self.kv),
                "tokens_out": self.num_answer_tokens,
                "sent_to": self.told_route or None,
                "class": self.priority.name.lower(),
                "waited_s": _rounded(self.waited_s),
                "queue_s": _rounded(self.queued_s),
                "ttft_s": _rounded(self.ttft_s),
                "tpot_s": _rounded(self.tpot_s),
                "finish": ",".join(dict.fromkeys(self.finishes)) or None,
            }
        say = log.debug if self.route in _QUIET else log.info
        say("request.finished", **{name: value for name, value in fields.items() if value is not None})

    def _observe(self, metrics: GatewayMetrics, model: str, e2e_s: float) -> None:
        metrics.prompt_tokens.labels(model).inc(self.num_prompt_tokens)
        metrics.cached_tokens.labels(model).inc(self.num_cached_tokens)
        metrics.generation_tokens.labels(model).inc(self.num_answer_tokens)
        metrics.e2e_s.labels(model).observe(e2e_s)
        if self.ttft_s is not None:
            metrics.ttft_s.labels(model).observe(self.ttft_s)
        if self.tpot_s is not None:
            metrics.tpot_s.labels(model).observe(self.tpot_s)
        for passed_over in self.passed_over:
            metrics.fallbacks.labels(passed_over).inc()
        for finish in self.finishes:
            metrics.answers.labels(model, finish.value).inc()


def open_account(scope: Scope) -> Account:
    """Begin the account of this request and leave it in the scope."""
    label = next((value for name, value in scope["headers"] if name == b"x-request-id"), None)
    account = Account(scope["method"], None if label is None else _shown(label))
    scope[_KEY] = account
    return account


def account_of(scope: Scope) -> Account:
    """The account that `open_account` left there."""
    account = scope[_KEY]
    assert isinstance(account, Account)
    return account


def _shown(label: bytes) -> str:
    text = label[:_MAX_LABEL].decode("ascii", "backslashreplace")
    return "".join(character if character.isprintable() else "?" for character in text)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
