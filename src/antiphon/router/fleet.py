"""The links of one gateway to its workers, and how they come and go.

Owns the set of links and the task that keeps each one up. A worker that is removed while answers are
open on it keeps its link until they have ended. Does not choose and does not retry.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import Iterable

from antiphon.core.generation import WorkerInfo
from antiphon.obs.log import Logger
from antiphon.router.link import LinkListener, WorkerLink, link_url


def replica_number(url: str) -> int:
    """The number by which every gateway knows the worker at this address: a session's choice hangs on it."""
    return int.from_bytes(hashlib.blake2b(url.encode(), digest_size=7).digest())


class Fleet:
    """Workers by address. Owned by one event loop; `run()` keeps the links up until cancelled."""

    def __init__(self, urls: Iterable[str], secret: str, listener: LinkListener, log: Logger) -> None:
        self._secret = secret
        self._tls: ssl.SSLContext | None = None
        self._listener = listener
        self._log = log
        self._links: dict[str, WorkerLink] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        for url in urls:
            self.add(url)

    @property
    def links(self) -> list[WorkerLink]:
        """All of them, up or down, in the order they were added."""
        return list(self._links.values())

    def serving(self, model: str) -> list[WorkerLink]:
        """Those that are up and serve this model, whether they take work now or not."""
        return [link for link in self._links.values() if link.info is not None and link.info.model == model]

    def workers(self, model: str) -> list[WorkerInfo]:
        """The workers that serve this model now."""
        return [link.info for link in self.serving(model) if link.info is not None]

    def add(self, url: str) -> None:
        """Keep a link to this worker from now on. Nothing changes where there is one. Raises BadRequest."""
        url = link_url(url)
        if url in self._links:
            self._links[url].is_leaving = False
            self._listener.load_changed(self._links[url])
            return
        self._links[url] = WorkerLink(url, self._secret, self._listener, self._log, replica_number(url))
        self._links[url].tls = self._tls
        if self._tasks is not None:
            self._start(url)

    def trust(self, tls: ssl.SSLContext) -> None:
        """Check workers at https addresses by this, from the next connection on."""
        self._tls = tls
        for link in self.links:
            link.tls = tls

    def remove(self, url: str) -> None:
        """Give this worker no more work; its link ends with its last answer."""
        url = link_url(url)
        link = self._links.get(url)
        if link is None:
            return
        link.is_leaving = True
        self._listener.load_changed(link)
        if not link.num_open_answers:
            self._drop(url)

    async def run(self) -> None:
        """Serve all links. Ends only when cancelled, and then every open answer has ended."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for url in self._links:
                    self._start(url)
                tasks.create_task(self._sweep(), name="links that leave")
        finally:
            self._tasks = None

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            for url in [url for url, link in self._links.items() if link.is_leaving]:
                if not self._links[url].num_open_answers:
                    self._drop(url)

    def _start(self, url: str) -> None:
        assert self._tasks is not None
        self._running[url] = self._tasks.create_task(self._links[url].run(), name=f"link {url}")

    def _drop(self, url: str) -> None:
        del self._links[url]
        task = self._running.pop(url, None)
        if task is not None:
            task.cancel()


_SWEEP_S = 0.5
