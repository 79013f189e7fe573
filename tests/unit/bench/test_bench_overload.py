"""What `bench overload` makes of answers: goodput, waits, refusals, recovery; loads, the plain line."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TypeAlias

import pytest
from bench.client import Answer, Request, Target
from bench.crowd import Arrival, Caller, Line, Sizes, Told, arrivals, closed_crowd, make_callers, open_crowd
from bench.overload_outcome import Outcome

from antiphon.core.generation import Priority
from antiphon.core.grant import Grant, Limits
from antiphon.store.database import Database
from antiphon.store.keys import KeyStore

Playback: TypeAlias = Callable[[Sequence[bytes]], AbstractAsyncContextManager[Target]]

BATCH, CHAT = (
    Caller(name, name, "sk", Grant(priority=priority))
    for name, priority in (("b", Priority.BATCH), ("c", Priority.INTERACTIVE))
)
BODY = (
    b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
)
GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
REFUSAL = (
    b"HTTP/1.1 429 Busy\r\nRetry-After: 7\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
)
LIMITS_S = (1.0, 2.0, 10.0)


def answered(at_s: float, first_s: float, ended_s: float, caller: Caller = CHAT) -> Told:
    """A right answer of 30 tokens of work."""
    made = Answer(at_s, first_s, ended_s, 200, 20, 10, 20, ended_s=ended_s)
    return Told(caller, made)


def refused(at_s: float, ended_s: float, again: bytes | None = b"3") -> Told:
    """One told to come again."""
    headers = {} if again is None else {b"retry-after": again}
    headers[b"x-antiphon-dropped-reason"] = b"rejected-queue-full"
    made = Answer(at_s, status=429, fault="status 429", headers=headers, sent_s=at_s, ended_s=ended_s)
    return Told(CHAT, made)


def outcome(*told: Told, from_s: float = 0.0, until_s: float = 10.0) -> Outcome:
    return Outcome("a load", told, from_s, until_s, LIMITS_S)


def test_goodput_is_what_was_in_time_for_its_class() -> None:
    """A second and a half is late for a chat, not for a batch; what ends outside the window is left out."""
    told = (
        answered(1.0, 1.9, 3.0),
        answered(1.0, 2.5, 3.0),
        answered(1.0, 2.5, 3.0, BATCH),
        answered(1.0, 1.1, 10.5),
        refused(1.0, 1.01),
    )
    goodput = outcome(*told).goodput
    assert goodput.requests_per_s == pytest.approx(0.2)
    assert goodput.work_per_s == pytest.approx(6.0)


def test_waits_are_those_of_the_admitted_and_endless_where_no_word_came() -> None:
    """Refused ones do not make a tail shorter, broken ones make it longer."""
    silent = Told(CHAT, Answer(0.0, status=200, fault="the stream ended without [DONE]"))
    assert outcome(answered(0.0, 0.5, 1.0), refused(0.0, 0.01)).ttft_s(99) == 0.5
    assert outcome(answered(0.0, 0.5, 1.0), silent).ttft_s(99) == math.inf
    assert outcome(silent, refused(0.0, 0.01)).broken == [silent]


def test_refusals_are_timed_from_their_leaving_and_need_a_hint() -> None:
    """A number of seconds it must be."""
    load = outcome(refused(1.0, 1.02), refused(2.0, 2.04, None), refused(3.0, 3.01, b"soon"))
    assert load.refusal_s(99) == pytest.approx(0.04)
    assert load.num_without_hint == 2
    assert load.reasons() == {"429 rejected-queue-full": 3}


def test_recovery_ends_with_the_last_request_that_was_refused_or_late() -> None:
    """By when it came; nought where none was."""
    load = outcome(answered(60.0, 60.1, 61.0), refused(63.0, 63.1), answered(64.0, 64.2, 65.0))
    assert load.recovered_s(60.0) == 3.0
    assert outcome(answered(60.0, 60.1, 61.0)).recovered_s(60.0) == 0.0


def test_parts_of_a_load() -> None:
    """By the time they were due, by caller, and a row a class where there are several."""
    load = outcome(answered(1.0, 1.1, 2.0), answered(5.0, 5.1, 6.0, BATCH))
    assert len(load.due(0.0, 5.0).told) == 1
    assert load.of(lambda one: one.caller is BATCH).admitted == [load.told[1]]
    assert list(load.rows()) == ["a load", "a load: interactive", "a load: batch"]
    assert list(load.due(0.0, 5.0).rows()) == ["a load"]


def test_arrivals_keep_rates_and_shares_and_repeat() -> None:
    """Each part at its rate, callers by their shares, sizes within their bounds, the same for one seed."""
    sizes = Sizes((10, 100), (2, 40))
    both = [(CHAT, 3.0), (BATCH, 1.0)]
    made = arrivals(random.Random(1), "m", sizes, both, [(100.0, 10.0), (20.0, 10.0)])
    assert made == arrivals(random.Random(1), "m", sizes, both, [(100.0, 10.0), (20.0, 10.0)])
    times = [arrival.request.at_s for arrival in made]
    assert all(a <= b for a, b in itertools.pairwise(times))
    early = sum(at_s < 10.0 for at_s in times)
    assert early == pytest.approx(1000, rel=0.15)
    assert len(made) - early == pytest.approx(200, rel=0.3)
    shares = Counter(arrival.caller.tenant for arrival in made)
    assert shares["c"] / shares["b"] == pytest.approx(3.0, rel=0.25)
    bodies = [json.loads(arrival.request.body) for arrival in made]
    lengths = [len(body["messages"][0]["content"]) for body in bodies]
    assert 10 <= min(lengths) < 15 < 80 < max(lengths) <= 100
    assert [body["max_tokens"] for body in bodies] == [arrival.request.num_tokens for arrival in made]


async def test_headers_of_a_refusal_and_the_load_s_own_lag_are_kept(playback: Playback) -> None:
    """An open load tells answered from refused, and what the server said."""
    crowd = [Arrival(CHAT, Request(at_s, "/", b"{}", 2)) for at_s in (0.0, 0.01)]
    async with playback([REFUSAL]) as target:
        told = await open_crowd(target.url, crowd, 20.0)
    assert all(one.is_refused and not one.is_admitted for one in told)
    assert {one.answer.headers[b"retry-after"] for one in told} == {b"7"}
    assert all(0 <= one.lag_s <= one.answer.sent_s - one.answer.at_s for one in told)


async def test_a_line_lets_so_many_through_in_their_order(playback: Playback) -> None:
    """And who waits too long goes, unserved."""
    order: list[float] = []
    line = Line(1)

    async def ask(at_s: float) -> Answer:
        answer = await line.send(target, Request(at_s, "/", b"{}", 2), started_s, 20.0)
        order.append(at_s)
        return answer

    async with playback([GOOD]) as target:
        started_s = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(ask(at_s) for at_s in (0.0, 0.001, 0.002)))
        assert [answer.fault for answer in answers] == [None] * 3
        assert order == [0.0, 0.001, 0.002]
        async with line._places:  # somebody who stays
            late = await line.send(target, Request(0.0, "/", b"{}"), started_s, 0.0)
    assert late.fault == "gave up in the line"


async def test_a_closed_load_has_one_request_a_lane_until_its_time_is_over(playback: Playback) -> None:
    """What is left of a lane is not sent."""
    lane = [Arrival(CHAT, Request(0.0, "/", b"{}", 2))] * 10_000
    async with playback([GOOD]) as target:
        told = await closed_crowd(target.url, [lane, lane], 0.2, 20.0)
    assert 2 <= len(told) < 20_000
    assert max(one.answer.at_s for one in told) <= 0.2


async def test_callers_have_keys_in_the_database(tmp_path: Path) -> None:
    """With the grants that were wanted."""
    url = f"sqlite:///{tmp_path / 'keys.db'}"
    bounded = Grant(priority=Priority.BATCH, limits=Limits(requests_per_minute=3))
    callers = await make_callers(url, [("a", Grant()), ("a", bounded)])
    assert callers[0].key != callers[1].key
    assert callers[1].at("http://x").headers == (("authorization", f"Bearer {callers[1].key}"),)
    database = await Database.open(url)
    keys = await KeyStore(database).list("a")
    await database.close()
    assert {key.id: key.grant for key in keys} == {caller.key_id: caller.grant for caller in callers}
