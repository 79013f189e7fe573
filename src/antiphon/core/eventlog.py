"""A numbered log of what happened to one answer.

Events get the numbers 0, 1, 2 …; any number of readers take up from any number still held. The log
is closed by exactly one terminal append per choice. It is bounded: past `limit` events the oldest
go, and a reader who asks for them is told so. Pure: who waits is woken through `subscribe`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

E = TypeVar("E")


class EventsGone(LookupError):
    """The events asked for were dropped; `first` is the oldest number still held."""

    def __init__(self, first: int) -> None:
        super().__init__(f"events before {first} are no longer held")
        self.first = first


class EventLog(Generic[E]):
    """Events of one answer. Not thread-safe: one event loop owns it."""

    def __init__(self, limit: int = 65536) -> None:
        self._events: deque[E] = deque()
        self._first = 0
        self._limit = limit
        self._closed = False
        self._listeners: list[Callable[[], None]] = []

    @property
    def next_number(self) -> int:
        """The number the next event will get."""
        return self._first + len(self._events)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def append(self, event: E) -> int:
        """Add an event and wake the readers. Returns its number."""
        if self._closed:
            raise RuntimeError("append to a closed event log")
        self._events.append(event)
        if len(self._events) > self._limit:
            self._events.popleft()
            self._first += 1
        self._wake()
        return self.next_number - 1

    def close(self) -> None:
        """Say that nothing follows. Safe to call twice."""
        self._closed = True
        self._wake()

    def since(self, number: int) -> list[E]:
        """Events from `number` on. Raises EventsGone where some of them were dropped."""
        if number < self._first:
            raise EventsGone(self._first)
        if number == self._first:
            return list(self._events)
        skip = number - self._first
        return [self._events[i] for i in range(skip, len(self._events))]

    def forget(self, number: int) -> None:
        """Drop the events before `number`: whoever wanted them has them."""
        while self._events and self._first < number:
            self._events.popleft()
            self._first += 1

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` at each append and at the close. Returns the call that ends it."""
        self._listeners.append(wake)
        return lambda: self._listeners.remove(wake)

    def _wake(self) -> None:
        for wake in tuple(self._listeners):
            wake()
