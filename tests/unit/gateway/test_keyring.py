"""What a gateway remembers of keys, with a database whose every word the test decides."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator, Callable, Collection

import pytest

from antiphon.core.clock import VirtualClock
from antiphon.core.errors import StoreUnavailable
from antiphon.gateway import keyring
from antiphon.gateway.keyring import TTL_S, USE_NOTED_EVERY_S, KeyRing
from antiphon.store.apikey import PREFIX, digest_of
from antiphon.store.keys import KeyOwner
from support.lines import Lines


def _key(number: int) -> str:
    """Keys that differ in their last characters alone."""
    return f"{PREFIX}{number:048d}"


class Scripted:
    """A database that knows the first `num_keys` keys, and when it was asked."""

    def __init__(self, num_keys: int = 0) -> None:
        self.owners = {
            digest_of(_key(n)): KeyOwner(f"key_{n}", f"id{n}", f"t{n}", False) for n in range(num_keys)
        }
        self.asked: list[bytes] = []
        self.asked_any = 0
        self.used: list[Collection[str]] = []
        self.is_broken = False
        self.hides_keys = False  # has_any says no
        self._called = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def owner(self, digest: bytes) -> KeyOwner | None:
        self.asked.append(digest)
        self._called.set()
        await self.may_answer.wait()
        self._check()
        return self.owners.get(digest)

    async def owner_by_id(self, key_id: str) -> KeyOwner | None:
        digests = [digest for digest, owner in self.owners.items() if owner.key_id == key_id]
        return await self.owner(digests[0] if digests else b"")

    async def has_any(self) -> bool:
        self.asked_any += 1
        self._called.set()
        self._check()
        return bool(self.owners) and not self.hides_keys

    async def mark_used(self, key_ids: Collection[str], at: datetime.datetime) -> None:
        self._check()
        assert (at.second, at.microsecond) == (0, 0)
        self.used.append(set(key_ids))
        self._called.set()

    async def until(self, has_come: Callable[[], bool]) -> None:
        """Wait for a call after which this holds."""
        async with asyncio.timeout(10):
            while not has_come():
                self._called.clear()
                await self._called.wait()

    def revoke(self, number: int) -> None:
        self.owners[digest_of(_key(number))] = KeyOwner(f"key_{number}", f"id{number}", f"t{number}", True)

    def _check(self) -> None:
        if self.is_broken:
            raise StoreUnavailable("words", detail="disk on fire")


@pytest.fixture
def clock() -> VirtualClock:
    """Time that stands still."""
    return VirtualClock()


@pytest.fixture
def lines() -> Lines:
    """The ring's log."""
    return Lines()


def _ring(keys: Scripted, clock: VirtualClock, lines: Lines) -> KeyRing:
    return KeyRing(keys, clock, lines.logger())


async def test_answer_is_remembered_for_a_while(clock: VirtualClock, lines: Lines) -> None:
    """The database is asked once in `TTL_S`, then again."""
    keys = Scripted(1)
    ring = _ring(keys, clock, lines)
    for _ in range(3):
        owner = await ring.owner(_key(0))
        assert owner is not None
        assert owner.tenant == "t0"
    clock.advance(TTL_S - 0.001)
    await ring.owner(_key(0))
    assert len(keys.asked) == 1
    clock.advance(0.001)
    await ring.owner(_key(0))
    assert len(keys.asked) == 2


async def test_revoked_key_ends_with_its_time(clock: VirtualClock, lines: Lines) -> None:
    """After `TTL_S` a revoked key is known to be one."""
    keys = Scripted(1)
    ring = _ring(keys, clock, lines)
    await ring.owner(_key(0))
    keys.revoke(0)
    clock.advance(TTL_S)
    owner = await ring.owner(_key(0))
    assert owner is not None
    assert owner.is_revoked


async def test_age_counts_from_the_question(clock: VirtualClock, lines: Lines) -> None:
    """An answer that took long is old already: what happened meanwhile may not be in it."""
    keys = Scripted(1)
    ring = _ring(keys, clock, lines)
    keys.may_answer.clear()
    asking = asyncio.create_task(ring.owner(_key(0)))
    await keys.until(lambda: len(keys.asked) == 1)
    clock.advance(TTL_S)
    keys.may_answer.set()
    await asking
    await ring.owner(_key(0))
    assert len(keys.asked) == 2


async def test_whole_keys_are_compared(clock: VirtualClock, lines: Lines) -> None:
    """Keys that begin alike lead to their own tenants, remembered or not."""
    ring = _ring(Scripted(2), clock, lines)
    for _ in range(2):
        owners = [await ring.owner(_key(number)) for number in (0, 1, 2)]
        assert [owner and owner.tenant for owner in owners] == ["t0", "t1", None]


@pytest.mark.parametrize("text", ["", "any", "sk-proj-abc", PREFIX, _key(0) + "0", "' OR 1=1; --"])
async def test_what_is_no_key_is_not_looked_up(text: str, clock: VirtualClock, lines: Lines) -> None:
    """Such texts never reach the database."""
    keys = Scripted(1)
    assert await _ring(keys, clock, lines).owner(text) is None
    assert keys.asked == []


async def test_unknown_keys_push_none_out(
    clock: VirtualClock, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many keys are tried, those that are known stay known."""
    monkeypatch.setattr(keyring, "MOST_KEYS", 2)
    keys = Scripted(1)
    ring = _ring(keys, clock, lines)
    await ring.owner(_key(0))
    for number in range(1, 10):
        assert await ring.owner(_key(number)) is None
    asked = len(keys.asked)
    await ring.owner(_key(0))
    assert len(keys.asked) == asked


async def test_memory_is_bounded(clock: VirtualClock, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound the key that was not used for longest is asked for again."""
    monkeypatch.setattr(keyring, "MOST_KEYS", 2)
    keys = Scripted(3)
    ring = _ring(keys, clock, lines)
    for number in (0, 1, 0, 2):
        await ring.owner(_key(number))
    assert len(keys.asked) == 3
    await ring.owner(_key(0))
    assert len(keys.asked) == 3
    await ring.owner(_key(1))
    assert len(keys.asked) == 4


async def test_one_question_for_many(clock: VirtualClock, lines: Lines) -> None:
    """Requests with the same key at the same time ask once; one that leaves takes nothing from the others."""
    keys = Scripted(1)
    ring = _ring(keys, clock, lines)
    keys.may_answer.clear()
    asking = [asyncio.create_task(ring.owner(_key(0))) for _ in range(20)]
    await keys.until(lambda: len(keys.asked) == 1)
    asking[0].cancel()
    keys.may_answer.set()
    answers = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert all(isinstance(answer, KeyOwner) for answer in answers[1:])
    assert len(keys.asked) == 1


async def test_silent_database_is_an_error(
    clock: VirtualClock, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request waits its time, not for ever; the answer that comes late serves the next one."""
    monkeypatch.setattr(keyring, "PATIENCE_S", 0.01)
    keys = Scripted(1)
    ring = _ring(keys, clock, lines)
    keys.may_answer.clear()
    with pytest.raises(StoreUnavailable):
        await ring.owner(_key(0))
    keys.may_answer.set()
    assert await ring.owner(_key(0)) is not None
    assert len(keys.asked) == 1


async def test_lookups_under_way_are_bounded(
    clock: VirtualClock, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of keys meets an error, not a heap of tasks."""
    monkeypatch.setattr(keyring, "MOST_ASKED", 2)
    keys = Scripted(2)
    ring = _ring(keys, clock, lines)
    keys.may_answer.clear()
    asking = [asyncio.create_task(ring.owner(_key(number))) for number in (0, 1)]
    await keys.until(lambda: len(keys.asked) == 2)
    with pytest.raises(StoreUnavailable):
        await ring.owner(_key(2))
    keys.may_answer.set()
    assert all(await asyncio.gather(*asking))
    assert await ring.owner(_key(2)) is None


async def test_broken_database_is_never_a_yes(clock: VirtualClock, lines: Lines) -> None:
    """What was known is not believed beyond its time; the log hears of it once; it heals by itself."""
    keys = Scripted(1)
    ring = _ring(keys, clock, lines)
    await ring.owner(_key(0))
    keys.is_broken = True
    assert await ring.owner(_key(0)) is not None
    clock.advance(TTL_S)
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            await ring.owner(_key(0))
    assert [line["detail"] for line in lines.named("keys.unavailable")] == ["disk on fire"]
    keys.is_broken = False
    assert await ring.owner(_key(0)) is not None
    keys.is_broken = True
    clock.advance(TTL_S)
    with pytest.raises(StoreUnavailable):
        await ring.owner(_key(0))
    assert len(lines.named("keys.unavailable")) == 2


async def test_whether_there_are_keys(clock: VirtualClock, lines: Lines) -> None:
    """Not known before it was asked, nor while the database is broken; a yes is for good."""
    keys = Scripted()
    ring = _ring(keys, clock, lines)
    with pytest.raises(StoreUnavailable):
        _ = ring.has_keys
    await ring.refresh()
    assert not ring.has_keys
    keys.is_broken = True
    with pytest.raises(StoreUnavailable):
        await ring.refresh()
    with pytest.raises(StoreUnavailable):
        _ = ring.has_keys
    keys.is_broken = False
    keys.owners = Scripted(1).owners
    await ring.refresh()
    keys.owners = {}
    await ring.refresh()
    assert ring.has_keys


@contextlib.asynccontextmanager
async def _running(ring: KeyRing) -> AsyncIterator[None]:
    task = asyncio.create_task(ring.run())
    yield
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_first_key_is_noticed(
    clock: VirtualClock, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running gateway learns of the first key, also after the database was away."""
    monkeypatch.setattr(keyring, "TTL_S", 0.001)
    keys = Scripted()
    ring = _ring(keys, clock, lines)
    await ring.refresh()
    async with _running(ring):
        keys.is_broken = True
        await lines.until("keys.unavailable")
        keys.owners = Scripted(1).owners
        keys.is_broken = False
        asked = keys.asked_any
        await keys.until(lambda: keys.asked_any > asked)
        await asyncio.sleep(0)
    assert ring.has_keys


async def test_uses_are_noted(clock: VirtualClock, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """About once a minute, each key once; not those that are revoked; the last ones at the end."""
    monkeypatch.setattr(keyring, "TTL_S", 0.001)
    keys = Scripted(4)
    keys.revoke(3)
    keys.hides_keys = True  # so that it keeps asking, which is how its turns are counted
    ring = _ring(keys, clock, lines)
    async with _running(ring):
        for number in (0, 0, 1, 3):
            await ring.owner(_key(number))
        await keys.until(lambda: keys.asked_any >= 3)
        assert keys.used == []
        clock.advance(USE_NOTED_EVERY_S)
        await keys.until(lambda: bool(keys.used))
        await ring.owner(_key(2))
    assert keys.used == [{"key_0", "key_1"}, {"key_2"}]


async def test_end_comes_though_the_database_is_gone(clock: VirtualClock, lines: Lines) -> None:
    """Uses that cannot be written and lookups under way do not keep a gateway from stopping."""
    keys = Scripted(1)
    ring = _ring(keys, clock, lines)
    await ring.owner(_key(0))
    async with _running(ring), asyncio.timeout(10):
        await asyncio.sleep(0)
        keys.is_broken = True
        keys.may_answer.clear()
        clock.advance(TTL_S)
        asking = asyncio.create_task(ring.owner(_key(0)))
        await keys.until(lambda: len(keys.asked) == 2)
    with pytest.raises(StoreUnavailable):
        await asking
    assert lines.named("keys.unavailable")


async def test_ids_are_remembered_as_keys_are(clock: VirtualClock, lines: Lines) -> None:
    """A key that is asked for by its id is found, remembered for `TTL_S`, and its use is noted."""
    keys = Scripted(2)
    ring = _ring(keys, clock, lines)
    for _ in range(3):
        owner = await ring.owner_by_id("key_1")
        assert owner is not None
        assert owner.tenant == "t1"
    assert len(keys.asked) == 1
    keys.revoke(1)
    clock.advance(TTL_S)
    owner = await ring.owner_by_id("key_1")
    assert owner is not None
    assert owner.is_revoked
    assert await ring.owner_by_id("key_9") is None
    running = asyncio.create_task(ring.run())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    assert keys.used == [{"key_1"}]
