"""Chooses a worker for each generation and moves an answer whose worker was lost too early.

Before the first token of an answer has arrived nobody can have seen anything of it: it moves to
another replica once, silently. After that it ends as lost. Does not know text or tenants.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from antiphon.core.errors import NoReplica
from antiphon.core.generation import Generation, Terminal, WorkerInfo
from antiphon.obs.log import Logger
from antiphon.router.answer import Answer
from antiphon.router.link import WorkerLink
from antiphon.router.policy import choose

MAX_MOVES = 1


def no_replica(model: str) -> NoReplica:
    """The error for a model that nobody serves now."""
    return NoReplica(f"No worker serves the model {model!r} at the moment; try again shortly.")


class Dispatcher:
    """The workers of one gateway. `run()` keeps their links up until cancelled."""

    def __init__(
        self, urls: Sequence[str], secret: str, log: Logger, draw: Callable[[], float] = random.random
    ) -> None:
        self._log = log
        self._draw = draw
        self.links = [WorkerLink(url, secret, self._move, log) for url in urls]

    async def run(self) -> None:
        """Serve all links. Ends only when cancelled, and then every open answer has ended."""
        async with asyncio.TaskGroup() as tasks:
            for link in self.links:
                tasks.create_task(link.run(), name=f"link {link.url}")

    def workers(self, model: str) -> list[WorkerInfo]:
        """The workers that serve this model now."""
        return [link.info for link in self.links if link.info is not None and link.info.model == model]

    def start(self, generation: Generation) -> Answer:
        """Send a generation to the best replica. Raises NoReplica where none serves its model."""
        answer = Answer(generation)
        self._send(answer)
        return answer

    def abort_all(self) -> None:
        """End every open answer, here and at its worker."""
        for link in self.links:
            link.abort_all()

    def _send(self, answer: Answer) -> None:
        model = answer.generation.model
        candidates = [
            link
            for link in self.links
            if link.takes_work and link.info is not None and link.info.model == model
        ]
        index = choose([link.replica_load() for link in candidates], self._draw())
        if index is None:
            raise no_replica(model)
        candidates[index].submit(answer)

    def _move(self, answer: Answer) -> None:
        """A link says that it lost this answer."""
        if answer.has_started or answer.num_moves >= MAX_MOVES:
            answer.end(Terminal.LOST)
            return
        answer.num_moves += 1
        try:
            self._send(answer)
        except NoReplica:
            answer.end(Terminal.LOST)
        else:
            self._log.info("answer.moved", generation=answer.generation.id)
