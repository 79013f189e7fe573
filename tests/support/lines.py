"""Log lines of one test, which can be waited for."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from antiphon.obs.log import Logger


class Lines:
    """Collects what is logged; nothing is printed."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self._changed = asyncio.Event()

    def logger(self) -> Logger:
        """A logger that writes here."""
        logger: Logger = structlog.wrap_logger(
            None, processors=[self._take], wrapper_class=structlog.make_filtering_bound_logger(0)
        )
        return logger

    def named(self, event: str) -> list[dict[str, Any]]:
        """The lines of this event so far."""
        return [line for line in self.all if line["event"] == event]

    async def until(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait until this event was logged `count` times."""
        async with asyncio.timeout(10):
            while len(self.named(event)) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.named(event)

    def _take(self, logger: object, level: str, line: dict[str, Any]) -> dict[str, Any]:
        self.all.append(line | {"level": level})
        self._changed.set()
        raise structlog.DropEvent
