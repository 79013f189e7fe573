"""The limits of keys and client tokens, kept by all gateways together.

A request is counted with an estimate before any work is done for it, and settled with what it really used
when its account closes, on every way out. Counting is one round trip to the control Redis, shared by the
requests that come at the same time; settling is written behind. Everything is counted here as well: while
Redis does not answer within 50 ms (it is then asked again once a second) a gateway enforces its part of
each limit, the limit ÷ the gateways last seen, by its own counts; without a Redis at all, the whole limit.

Invariants: a request that was refused, or whose client left meanwhile, is counted nowhere; a place among
`max_concurrent` is free here as soon as the account closes; what waits to be written is bounded. Budgets
start from what the database knows, which is the truth on them, and are compared with it after an outage.
A request counts for its minute once it has passed, whatever becomes of it; its tokens as far as its client
is charged, cached ones too.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from antiphon.core.clock import Clock
from antiphon.core.grant import Meter
from antiphon.core.metering import Period, Standing, breach_of, period_of, share_of, slot_of
from antiphon.gateway.account import Account
from antiphon.gateway.clienttokens import MAX_MINUTES
from antiphon.gateway.limitledger import LimitLedger, SharedCounts
from antiphon.gateway.limitwords import limit_headers, refusal
from antiphon.gateway.localmeter import LocalMeter, Meters
from antiphon.gateway.schema import ChatRequest, GeneratingRequest
from antiphon.kv.controlredis import ControlFault
from antiphon.kv.limitcounters import Counted
from antiphon.obs.limitmetrics import LimitMetrics
from antiphon.obs.log import Logger

_BYTES_A_TOKEN = 4
_LIFE = "life"  # the period of a client token's budget
_MOST_LIFE_S = 60.0 * MAX_MINUTES + 600.0  # clocks of gateways may differ


class Spent(Protocol):
    """What the database knows of budgets. Raises StoreUnavailable."""

    async def tokens_since(self, key_id: str, since: datetime.datetime) -> int: ...

    async def tokens_of_client_token(self, token_id: str, since: datetime.datetime) -> int: ...


@dataclass(slots=True)
class _Hold:
    """What a request has counted at one meter."""

    meter: Meter
    local: LocalMeter
    tokens: int
    local_slot: int
    slot: int | None = None  # by Redis' clock; None: it is not counted there


class Limiter:
    """One a gateway. Used on its event loop alone. `shared` None: there is no control Redis."""

    def __init__(
        self,
        shared: SharedCounts | None,
        spent: Spent,
        metrics: LimitMetrics,
        clock: Clock,
        log: Logger,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._ledger = None if shared is None else LimitLedger(shared, metrics, clock, log)
        self._spent = spent
        self._metrics = metrics
        self._clock = clock
        self._wall = wall
        self._meters = Meters()

    async def reserve(self, request: GeneratingRequest, account: Account) -> None:
        """Count a request; its account's close settles it. Raises Busy, StoreUnavailable."""
        assert account.caller is not None  # CallerMiddleware: no request comes this far without one
        meters = [meter for meter in account.caller.meters if _is_bounded(meter)]
        holds: list[_Hold] = []
        with ExitStack() as undo:  # refused, or its client left
            for meter in meters:
                hold = self._hold(meter, request)
                holds.append(hold)
                undo.callback(self._give_back, hold, -1, -hold.tokens)
                await self._check(hold, account)
            undo.pop_all()
        if holds:
            account.at_close(partial(self._settle, holds, account, request.n or 1))

    async def run(self) -> None:
        """Keep in touch with the other gateways until cancelled."""
        if self._ledger is None:
            await asyncio.get_running_loop().create_future()
        else:
            await self._ledger.run()

    def _hold(self, meter: Meter, request: GeneratingRequest) -> _Hold:
        """Count the request here."""
        local = self._meters.get(meter.id)
        now_s = self._clock.now()
        hold = _Hold(meter, local, estimate(request, meter, local.answer_tokens), slot_of(now_s))
        local.num_open += 1
        local.open_tokens += hold.tokens
        local.add(now_s, hold.local_slot, 1, hold.tokens)
        return hold

    async def _check(self, hold: _Hold, account: Account) -> None:
        """Count it for all, and see whether it passes. Raises Busy, StoreUnavailable."""
        enforced, standing, period = await self._standing(hold)
        breach = breach_of(enforced, standing, hold.tokens, period)
        headers = list(limit_headers(hold.meter.limits, standing))
        if headers:  # of a client token that has limits of its own, those
            account.headers = headers
        if breach is not None:
            self._metrics.refusals.labels(breach.kind.value).inc()
            raise refusal(breach)

    async def _standing(self, hold: _Hold) -> tuple[Meter, Standing, Period]:
        """What is to be enforced of a meter, where it stands, and when."""
        ledger = self._ledger
        if ledger is not None and not ledger.is_away:
            with suppress(ControlFault):  # the ledger has told: from here on alone
                return await self._shared_standing(hold, ledger)
        period = period_of(self._wall())
        await self._learn_budgets(hold, period)
        num_gateways = 1 if ledger is None else ledger.num_gateways
        standing = hold.local.standing(self._clock.now(), period.day, period.month, _LIFE)
        return share_of(hold.meter, num_gateways), standing, period

    async def _shared_standing(self, hold: _Hold, ledger: LimitLedger) -> tuple[Meter, Standing, Period]:
        """As Redis knows it. Raises ControlFault, StoreUnavailable."""
        meter, local = hold.meter, hold.local
        change, counted = await ledger.count(meter, hold.tokens, local)
        hold.slot = change.slot
        period, standing = change.period, counted.standing
        if counted.unknown:
            standing = await self._with_budgets(meter, period, counted, ledger)
        elif local.is_unshared:
            standing = await self._caught_up(hold, period, counted, ledger)
        local.spent = {period.day: standing.day, period.month: standing.month, _LIFE: standing.total}
        return meter, standing, period

    async def _with_budgets(
        self, meter: Meter, period: Period, counted: Counted, ledger: LimitLedger
    ) -> Standing:
        """Start what Redis counts of budgets with what the database knows. Raises as both do."""
        spent = await self._spent_before(meter, period)
        names = _fields(period)
        before = {field: spent.get(names[field], 0) for field in counted.unknown}
        await ledger.seed(meter, before)
        now = counted.standing
        return replace(
            now,
            day=now.day + before.get(f"D{period.day}", 0),
            month=now.month + before.get(f"M{period.month}", 0),
            total=now.total + before.get("X", 0),
        )

    async def _caught_up(
        self, hold: _Hold, period: Period, counted: Counted, ledger: LimitLedger
    ) -> Standing:
        """Where requests passed while Redis was away the database knows more. Raises as both do."""
        meter, now = hold.meter, counted.standing
        hold.local.is_unshared = is_caught_up = False
        try:
            spent = await self._spent_before(meter, period)
            totals = {period.day: now.day, period.month: now.month, _LIFE: now.total}
            lacking = {name: max(tokens + hold.tokens - totals[name], 0) for name, tokens in spent.items()}
            names = _fields(period)
            await ledger.correct(
                meter, {field: tokens + lacking[names[field]] for field, tokens in counted.before.items()}
            )
            is_caught_up = True
        finally:
            if not is_caught_up:
                hold.local.is_unshared = True  # whoever comes next tries again
        return replace(
            now,
            day=now.day + lacking.get(period.day, 0),
            month=now.month + lacking.get(period.month, 0),
            total=now.total + lacking.get(_LIFE, 0),
        )

    async def _learn_budgets(self, hold: _Hold, period: Period) -> None:
        """Ask the database where this gateway does not know. Raises StoreUnavailable."""
        limits, spent = hold.meter.limits, hold.local.spent
        is_known = (
            (limits.tokens_per_day is None or period.day in spent)
            and (limits.tokens_per_month is None or period.month in spent)
            and (hold.meter.max_tokens is None or _LIFE in spent)
        )
        if not is_known:
            before = await self._spent_before(hold.meter, period)
            known, own = hold.local.spent, hold.local.open_tokens  # another one may have asked as well
            hold.local.spent = {name: known.get(name, tokens + own) for name, tokens in before.items()}

    async def _spent_before(self, meter: Meter, period: Period) -> dict[str, int]:
        """What the database knows, by period. Raises StoreUnavailable."""
        spent: dict[str, int] = {}
        if meter.limits.tokens_per_day is not None:
            spent[period.day] = await self._spent.tokens_since(meter.id, _begin(period.day))
        if meter.limits.tokens_per_month is not None:
            spent[period.month] = await self._spent.tokens_since(meter.id, _begin(f"{period.month}01"))
        if meter.max_tokens is not None:
            born = datetime.datetime.fromtimestamp(
                (meter.expires_at or self._wall()) - _MOST_LIFE_S, datetime.UTC
            )
            spent[_LIFE] = await self._spent.tokens_of_client_token(meter.id, born)
        return spent

    def _settle(self, holds: Sequence[_Hold], account: Account, num_answers: int) -> None:
        """The request has ended: it used so much."""
        used = account.num_prompt_tokens + account.num_answer_tokens if account.is_charged else 0
        for hold in holds:
            self._give_back(hold, 0, used - hold.tokens)
            if account.num_answer_tokens:
                hold.local.learn(account.num_answer_tokens / num_answers)

    def _give_back(self, hold: _Hold, requests: int, tokens: int) -> None:
        local = hold.local
        local.num_open -= 1
        local.open_tokens -= hold.tokens
        local.add(self._clock.now(), hold.local_slot, requests, tokens)
        ledger = self._ledger
        if ledger is None:
            return
        if hold.slot is not None:
            ledger.note(hold.meter, hold.slot, requests, tokens, local)
        elif ledger.is_alone:
            local.is_unshared = True
        else:  # it passed while Redis was away, which is back
            ledger.note(hold.meter, None, 0, hold.tokens + tokens, local)


def estimate(request: GeneratingRequest, meter: Meter, answer_tokens: float) -> int:
    """Tokens that a request is expected to use: its prompt, and answers as they usually are."""
    prompt = _num_prompt_tokens(request)
    most = request.answer_limit
    answer = round(answer_tokens) if most is None else min(round(answer_tokens), most)
    answers = answer * (request.n or 1)
    limit = meter.limits.tokens_per_minute
    if limit is not None:  # an answer that may turn out short is no reason to refuse a prompt that fits
        answers = min(answers, max(limit - prompt, 1))
    return prompt + answers


def _num_prompt_tokens(request: GeneratingRequest) -> int:
    if isinstance(request, ChatRequest):
        num_bytes = 0
        for message in request.messages:
            content = message.content or message.refusal or ""
            texts = [content] if isinstance(content, str) else [part.text or "" for part in content]
            num_bytes += sum(_num_bytes(text) for text in texts)
        return num_bytes // _BYTES_A_TOKEN + 1
    items = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    return sum(
        _num_bytes(item) // _BYTES_A_TOKEN + 1
        if isinstance(item, str)
        else 1
        if isinstance(item, int)
        else len(item)
        for item in items
    )


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def _fields(period: Period) -> dict[str, str]:
    """The period that each field of the shared counts is about."""
    return {f"D{period.day}": period.day, f"M{period.month}": period.month, "X": _LIFE}


def _begin(day: str) -> datetime.datetime:
    return datetime.datetime.strptime(f"{day}+0000", "%Y%m%d%z")


def _is_bounded(meter: Meter) -> bool:
    return meter.limits.is_bounded or meter.max_tokens is not None
