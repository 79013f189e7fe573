"""Where requests of a model may go now: at its workers, or at the server that answers for it.

Reads what the survey knows; decides nothing. Several gateways read the same reports: together they may let
in, for each gateway more, what one lets in between two reports of a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from antiphon.router.link import WorkerLink
from antiphon.router.room import Room
from antiphon.router.survey import Survey


class Places:
    """Of one gateway. `most`: how many requests may be at each server that answers for us, by model."""

    def __init__(self, survey: Survey, most: Mapping[str, int]) -> None:
        self._survey = survey
        self._most = most
        self._news: dict[
            str, dict[WorkerLink, None]
        ] = {}  # links with something new, of models that are watched
        self._on_news: Callable[[str], None] | None = None
        survey.on_news = self._note

    def watch(self, on_news: Callable[[str], None]) -> None:
        """Call this when there may be more room at a model that is attended to, or nobody any more.

        It is called from within the survey, and must not start anything itself.
        """
        self._on_news = on_news

    def attend_to(self, model: str) -> None:
        """Somebody waits for this model: keep its news."""
        self._news.setdefault(model, {})

    def forget(self, model: str) -> None:
        """Nobody waits for it any more."""
        self._news.pop(model, None)

    def is_served(self, model: str) -> bool:
        """Whether anybody takes requests of this model."""
        return model in self._most or self._survey.takes(model)

    def rooms(self, model: str, num_running: int) -> Iterator[Room]:
        """All that there is, least busy first. `num_running` sequences were let in and have not ended."""
        if model in self._most:
            yield Room(self._most[model] - num_running)
        else:
            yield from self._survey.rooms(model)

    def news(self, model: str, num_running: int) -> Iterator[Room]:
        """Rooms that may have changed since the last call."""
        if model in self._most:
            yield from self.rooms(model, num_running)
            return
        links = self._news.get(model)
        if not links:
            return
        self._news[model] = {}
        for link in links:
            room = self._survey.room(link)
            if room is not None:
                yield room

    def _note(self, link: WorkerLink, model: str) -> None:
        news = self._news.get(model)
        if news is not None:
            news[link] = None
            if self._on_news is not None:
                self._on_news(model)
