"""A dispatcher in front of loopback workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from antiphon.router.dispatch import Dispatcher, FailureHandling
from support.lines import Lines
from support.loopback import SECRET, LoopbackWorker


@contextlib.asynccontextmanager
async def dispatcher(
    *workers: LoopbackWorker, lines: Lines | None = None, failure: FailureHandling | None = None
) -> AsyncIterator[Dispatcher]:
    """A dispatcher whose links to these workers are up; ties go to the first."""
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker.running())
        lines = lines or Lines()
        urls = [worker.url for worker in workers]
        made = Dispatcher(urls, SECRET, lines.logger(), draw=lambda: 0.0, failure=failure)
        task = asyncio.create_task(made.run())
        try:
            await lines.until("link.up", len(workers))
            yield made
        finally:
            task.cancel()
            await asyncio.wait([task])


async def until(is_so: Callable[[], bool]) -> None:
    """Look again and again."""
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.002)
