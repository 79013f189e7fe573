"""F27 and the flood: `antiphon serve` is asked for twice what it can do, and by one key for all it can.

Steps of the scripted model take as long as a real one's would, so that places run out long before cores do.
Nothing is said of seconds: what is compared is how many were answered, refused or let in before.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from bench.client import send
from bench.crowd import CLASSES, Caller, Sizes, Told, arrivals, make_callers, open_crowd
from tests.support.served import Served, serving

from antiphon.core.generation import Priority
from antiphon.core.grant import Grant

MODEL = "live"
CATALOGUE = """[[model]]
name = "live"
engine = "scripted"
script = "babble"
context = 2048
step_s = 0.01
prefill_token_s = 0.0002
decode_row_s = 0.0005
"""
NUM_WORKERS = 2
NUM_AT_ONCE = 8  # at each
CAPACITY_PER_S = 19.0  # 2 workers; 200 prompt tokens and 32 steps of 14 ms among 8: 0.1 s a request
SIZES = Sizes((100, 400), (16, 64))
PATIENCE_S = 60.0
TENANTS = ("ant", "bee", "cat")


@dataclass(frozen=True)
class Fleet:
    """A running serve and its keys."""

    served: Served
    callers: Sequence[Caller]

    def of(self, tenant: str) -> Caller:
        return next(caller for caller in self.callers if caller.tenant == tenant)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two workers, tenants with a key of each class, a light and a heavy one."""
    folder = tmp_path_factory.mktemp("overload")
    file = folder / "models.toml"
    file.write_text(CATALOGUE)
    database = f"sqlite:///{folder / 'keys.db'}"
    wanted = [(name, Grant(priority=priority)) for name in TENANTS for priority in CLASSES]
    wanted += [(name, Grant()) for name in ("light", "heavy")]
    callers = asyncio.run(make_callers(database, wanted))
    options = ("--model", MODEL, "--catalogue", str(file), "--workers", str(NUM_WORKERS), "--port", "0")
    bounds = ("--max-sequences", str(NUM_AT_ONCE), "--queue-wait", "1")
    with serving(*options, *bounds, ANTIPHON_DATABASE_URL=database) as served:
        yield Fleet(served, callers)


def is_honest(told: Told) -> bool:
    """Answered whole and right, or told when to come again and that nothing was done."""
    answer = told.answer
    if answer.fault is None:
        return True
    reason = answer.headers.get(b"x-antiphon-dropped-reason", b"")
    again_s = answer.headers.get(b"retry-after", b"")
    return answer.status == 429 and reason.startswith(b"rejected-") and again_s.isdigit() and int(again_s) > 0


async def test_twice_the_capacity(fleet: Fleet) -> None:
    """What can be done is done, the rest is refused, urgent ones first served; then all is as before."""
    seconds = 7.0
    mixed = [(caller, 1.0) for caller in fleet.callers if caller.tenant in TENANTS]
    load = [(2 * CAPACITY_PER_S, seconds)]
    crowd = arrivals(random.Random(27), MODEL, SIZES, mixed, load)
    told = await open_crowd(fleet.served.url, crowd, PATIENCE_S)
    assert [one.answer.fault for one in told if not is_honest(one)] == []
    asked = Counter(one.caller.grant.priority for one in told)
    answered = Counter(one.caller.grant.priority for one in told if one.answer.fault is None)
    assert answered.total() > 0.5 * CAPACITY_PER_S * seconds
    assert answered.total() < asked.total()
    shares = [answered[priority] / asked[priority] for priority in CLASSES]
    assert shares == sorted(shares, reverse=True)
    assert shares[Priority.INTERACTIVE] > 1.5 * shares[Priority.BATCH]
    assert answered[Priority.BATCH] > 0
    calm = arrivals(random.Random(28), MODEL, SIZES, mixed, [(0.3 * CAPACITY_PER_S, 1.0)])
    after = await open_crowd(fleet.served.url, calm, PATIENCE_S)
    assert [one.answer.fault for one in after if one.answer.fault is not None] == []


async def test_a_flood_from_one_key_leaves_another_usable(fleet: Fleet) -> None:
    """One key has five times as many requests open as there are places; none of another's is refused, and few
    of the flood begin between its coming and its first word.
    """
    loop = asyncio.get_running_loop()
    url, draw, started_s = fleet.served.url, random.Random(4), loop.time()
    light, heavy = fleet.of("light"), fleet.of("heavy")
    begun_s: list[float] = []
    is_full, is_over = asyncio.Event(), False

    async def flood() -> None:
        while not is_over:
            request = SIZES.request(draw, MODEL)
            answer = await send(heavy.at(url), request, started_s, PATIENCE_S)
            assert is_honest(Told(heavy, answer)), answer.fault
            if answer.first_s is not None:
                begun_s.append(answer.first_s)
                if len(begun_s) == 2 * NUM_WORKERS * NUM_AT_ONCE:  # all places are taken, and more wait
                    is_full.set()
            else:
                await asyncio.sleep(0.05)

    lanes = [asyncio.create_task(flood()) for _ in range(5 * NUM_WORKERS * NUM_AT_ONCE)]
    await is_full.wait()
    chats = []
    for _ in range(8):
        chats.append(await send(light.at(url), SIZES.request(draw, MODEL), started_s, PATIENCE_S))
    is_over = True
    await asyncio.gather(*lanes)
    assert [chat.fault for chat in chats if chat.fault is not None] == []
    begun_before = [
        sum(chat.sent_s < at_s < chat.first_s for at_s in begun_s)
        for chat in chats
        if chat.first_s is not None
    ]
    assert sorted(begun_before)[len(chats) // 2] < NUM_WORKERS * NUM_AT_ONCE
