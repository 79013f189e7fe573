"""Who computes generations: the workers, or an upstream that takes token ids.

The `Backend` seam is what the gateway asks of either: how long an answer may get, and an `Answer`
that is filled as it is computed. Errors that come later end the answer, as a worker's refusals do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from antiphon.core.generation import Generation
from antiphon.router.answer import Answer
from antiphon.router.dispatch import Dispatcher
from antiphon.router.picker import no_replica


class Backend(Protocol):
    """Computes generations of some models."""

    def most_context_tokens(self, model: str) -> int | None:
        """What all who may take such a request can hold; None: as the catalogue says. Raises NoReplica."""
        ...

    def start(self, generation: Generation) -> Answer:
        """Begin. Never waits. Raises NoReplica."""
        ...


class Workers:
    """The workers of a fleet as a backend."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def most_context_tokens(self, model: str) -> int | None:
        workers = self._dispatcher.fleet.workers(model)
        if not workers:
            raise no_replica(model)
        return min(worker.context_tokens for worker in workers)

    def start(self, generation: Generation) -> Answer:
        return self._dispatcher.start(generation)


class Backends:
    """One backend a model: its own where it has one, else the workers."""

    def __init__(self, workers: Backend, own: Mapping[str, Backend]) -> None:
        self._workers = workers
        self._own = own

    def most_context_tokens(self, model: str) -> int | None:
        return self._of(model).most_context_tokens(model)

    def start(self, generation: Generation) -> Answer:
        return self._of(generation.model).start(generation)

    def _of(self, model: str) -> Backend:
        return self._own.get(model, self._workers)
