"""What a gateway remembers of keys, so that a request rarely asks the database.

Invariants: an answer is `TTL_S` old at most, counted from when the database was asked, so a revoked
key is refused after that time; keys nobody knows are not remembered, so that sending many of them
pushes none out; a request waits `PATIENCE_S` at most, and when nobody knows it is an error, never a yes.
Looking up the same key at the same time asks once. Uses of keys are noted about once a minute.
"""

from __future__ import annotations

import asyncio
import datetime
from collections import OrderedDict
from collections.abc import Collection
from typing import Protocol

from antiphon.core.clock import Clock
from antiphon.core.errors import StoreUnavailable
from antiphon.obs.log import Logger
from antiphon.store.apikey import digest_of
from antiphon.store.keys import KeyOwner

TTL_S = 5.0
PATIENCE_S = 3.0
MOST_KEYS = 10_000
MOST_ASKED = 256  # lookups under way
USE_NOTED_EVERY_S = 60.0


class Keys(Protocol):
    """What is asked of the database. Every method raises StoreUnavailable."""

    async def owner(self, digest: bytes) -> KeyOwner | None: ...

    async def owner_by_id(self, key_id: str) -> KeyOwner | None: ...

    async def has_any(self) -> bool: ...

    async def mark_used(self, key_ids: Collection[str], at: datetime.datetime) -> None: ...


class KeyRing:
    """The keys of one gateway process. Used on its event loop alone."""

    def __init__(self, keys: Keys, clock: Clock, log: Logger) -> None:
        self._keys = keys
        self._clock = clock
        self._log = log
        # By digest or id: when the database was asked, and what it said; the last used stands last.
        self._known: OrderedDict[bytes | str, tuple[float, KeyOwner]] = OrderedDict()
        self._asking: dict[bytes | str, asyncio.Task[KeyOwner | None]] = {}
        self._used: set[str] = set()
        self._has_keys: bool | None = None  # None: the database does not say
        self._is_told = False  # the log knows that the database does not answer

    @property
    def has_keys(self) -> bool:
        """Whether a key was ever created; once true, it stays so. Raises StoreUnavailable."""
        if self._has_keys is None:
            raise _unknown("whether there are keys is not known")
        return self._has_keys

    async def owner(self, key: str) -> KeyOwner | None:
        """Whose key this is; revoked ones too, None for what is no key. Raises StoreUnavailable."""
        digest = digest_of(key)
        return None if digest is None else await self._find(digest)

    async def owner_by_id(self, key_id: str) -> KeyOwner | None:
        """Whose key has this id, as above. For ids that were proven to be of keys."""
        return await self._find(key_id)

    async def _find(self, name: bytes | str) -> KeyOwner | None:
        asked_s, owner = self._known.get(name, (None, None))
        if asked_s is None or self._clock.now() - asked_s >= TTL_S:
            owner = await self._ask(name)
        else:
            self._known.move_to_end(name)
        if owner is not None and not owner.is_revoked and len(self._used) < MOST_KEYS:
            self._used.add(owner.key_id)
        return owner

    async def refresh(self) -> None:
        """Find out whether there are keys. Raises StoreUnavailable."""
        if self._has_keys:
            return
        try:
            self._has_keys = await self._keys.has_any()
        except StoreUnavailable:
            self._has_keys = None
            raise

    async def run(self) -> None:
        """Stay up to date until cancelled; then note the last uses."""
        noted_s = self._clock.now()
        try:
            while True:
                await asyncio.sleep(TTL_S)
                try:
                    await self.refresh()
                except StoreUnavailable as error:
                    self._tell(error)
                if self._clock.now() - noted_s >= USE_NOTED_EVERY_S:
                    noted_s = self._clock.now()
                    await self._note_uses()
        finally:
            for task in self._asking.values():
                task.cancel()
            await asyncio.gather(*self._asking.values(), return_exceptions=True)
            await self._note_uses()

    async def _ask(self, name: bytes | str) -> KeyOwner | None:
        task = self._asking.get(name)
        if task is None:
            if len(self._asking) >= MOST_ASKED:
                raise _unknown("too many lookups are under way")
            task = asyncio.create_task(self._look_up(name), name="key lookup")
            task.add_done_callback(_hear)
            self._asking[name] = task
        # Not awaited itself: a request that goes away must not take the answer from the others.
        await asyncio.wait([task], timeout=PATIENCE_S)
        if not task.done() or task.cancelled():
            raise _unknown("a lookup takes too long")
        return task.result()

    async def _look_up(self, name: bytes | str) -> KeyOwner | None:
        asked_s = self._clock.now()
        try:
            owner = await (
                self._keys.owner(name) if isinstance(name, bytes) else self._keys.owner_by_id(name)
            )
        except StoreUnavailable as error:
            self._tell(error)
            raise
        finally:
            del self._asking[name]
            self._known.pop(name, None)
        self._is_told = False
        if owner is not None:
            self._known[name] = (asked_s, owner)
            if len(self._known) > MOST_KEYS:
                self._known.popitem(last=False)
        return owner

    async def _note_uses(self) -> None:
        used, self._used = self._used, set()
        if not used:
            return
        now = datetime.datetime.now(datetime.UTC).replace(second=0, microsecond=0)
        try:
            await self._keys.mark_used(used, now)
        except StoreUnavailable as error:
            self._tell(error)

    def _tell(self, error: StoreUnavailable) -> None:
        if not self._is_told:
            self._log.warning("keys.unavailable", detail=error.detail)
        self._is_told = True


def _hear(task: asyncio.Task[KeyOwner | None]) -> None:
    """Take note of how a lookup ended, where nobody waits for it any more."""
    if not task.cancelled():
        task.exception()


def _unknown(detail: str) -> StoreUnavailable:
    return StoreUnavailable("Keys cannot be checked now. Please try again.", detail=detail)
