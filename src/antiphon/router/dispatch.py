"""Sends each generation to a worker and moves an answer whose worker was lost too early.

Before the first token of an answer has arrived nobody can have seen anything of it: it moves to
another replica once, silently. After that it ends as lost. Does not know text or tenants.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from antiphon.core.errors import NoReplica
from antiphon.core.generation import Generation, Terminal
from antiphon.core.wire import Blocks
from antiphon.obs.log import Logger
from antiphon.router.answer import Answer
from antiphon.router.fleet import Fleet
from antiphon.router.link import WorkerLink
from antiphon.router.picker import Picker

MAX_MOVES = 1


class Dispatcher:
    """The answers of one gateway. `run()` keeps its links up until cancelled."""

    def __init__(
        self, urls: Sequence[str], secret: str, log: Logger, draw: Callable[[], float] = random.random
    ) -> None:
        self._log = log
        self.fleet = Fleet(urls, secret, self, log)
        self._picker = Picker(self.fleet, draw)

    async def run(self) -> None:
        """Serve all links. Ends only when cancelled, and then every open answer has ended."""
        await self.fleet.run()

    def start(self, generation: Generation) -> Answer:
        """Send a generation to the best replica. Raises NoReplica where none serves its model."""
        answer = Answer(generation)
        self._send(answer)
        return answer

    def link_is_up(self, link: WorkerLink) -> None:
        """A worker can be reached."""

    def link_is_down(self, link: WorkerLink) -> None:
        """A worker was lost."""

    def answer_is_lost(self, link: WorkerLink, answer: Answer) -> None:
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

    def on_blocks(self, link: WorkerLink, blocks: Blocks) -> None:
        """A worker says what has become of its blocks."""

    def _send(self, answer: Answer) -> None:
        self._picker.pick(answer.generation).submit(answer)
