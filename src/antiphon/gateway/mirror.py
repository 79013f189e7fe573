"""Copies of requests for a second fleet, whose answers nobody waits for.

A copy runs beside the client's request and cannot touch it: it has its own account, which is never
booked, its own deadline and its own bound; past that bound copies are dropped. What happens to them is
counted, and nothing of it reaches a client or a bill.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from antiphon.core.errors import AntiphonError
from antiphon.core.generation import Priority, Terminal
from antiphon.gateway.account import Account
from antiphon.gateway.admission import OpenGate
from antiphon.gateway.course import Course, Prepare
from antiphon.gateway.models import AnyModel
from antiphon.gateway.text import NO_MATTER_S
from antiphon.obs.log import Logger
from antiphon.obs.metrics import UpstreamMetrics

MAX_COPIES = 16
TIMEOUT_S = 60.0


class Mirror:
    """The copies that one gateway has under way. `close` it."""

    def __init__(
        self,
        metrics: UpstreamMetrics,
        log: Logger,
        max_copies: int = MAX_COPIES,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._metrics = metrics
        self._log = log
        self._max_copies = max_copies
        self._timeout_s = timeout_s
        self._copies: set[asyncio.Task[None]] = set()

    def copy(self, model: AnyModel, prepare: Prepare, original: Account) -> None:
        """Send this model what `prepare` makes ready. Returns at once."""
        if len(self._copies) >= self._max_copies:
            self._metrics.mirrored.labels(model.name, "dropped").inc()
            return
        account = Account(original.method, None)
        account.caller = original.caller
        account.priority = Priority.BATCH
        account.timeout_s = self._timeout_s
        course = Course([model], prepare, account, OpenGate(), self._log)
        task = asyncio.create_task(self._run(course), name="mirror")
        self._copies.add(task)
        task.add_done_callback(self._note(model.name))

    async def close(self) -> None:
        """End all of them."""
        for task in self._copies:
            task.cancel()
        await asyncio.gather(*self._copies, return_exceptions=True)

    async def _run(self, course: Course) -> None:
        deadline = asyncio.get_running_loop().call_later(self._timeout_s, course.end, Terminal.DEADLINE)
        try:
            async for _ in course.batches(NO_MATTER_S):
                pass
        finally:
            deadline.cancel()
            course.end(Terminal.ABORTED)

    def _note(self, model: str) -> Callable[[asyncio.Task[None]], None]:
        def note(task: asyncio.Task[None]) -> None:
            self._copies.discard(task)
            error = None if task.cancelled() else task.exception()
            outcome = "failed" if task.cancelled() or error is not None else "ok"
            self._metrics.mirrored.labels(model, outcome).inc()
            if error is not None and not isinstance(error, AntiphonError):
                self._log.error("mirror.fault", model=model, kind=type(error).__name__)

        return note
