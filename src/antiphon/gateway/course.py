"""One request on its way along the models that may answer it.

The first model that begins to answer is the one that answers: where it fails before its first word for
want of capacity, the next is asked, and the client sees nothing of it. Invariants: no model is asked
after a word has left, after the client has left, or for a mistake of the client's; a source that was
started has ended when the next one starts; the account is that of the model that is asked now.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, TypeAlias

from antiphon.core.errors import AntiphonError, Busy, DeadlineExceeded
from antiphon.core.generation import Terminal
from antiphon.gateway.account import Account
from antiphon.gateway.errors import of_output
from antiphon.gateway.models import AnyModel
from antiphon.gateway.text import NO_MATTER_S, Piece, whole_of
from antiphon.obs.log import Logger


class Speaker(Protocol):
    """Whose words a response holds."""

    @property
    def fingerprint(self) -> str:
        """Names what computes the answer. Final once a piece has come."""
        ...


class Source(Speaker, Protocol):
    """An answer that is being made by one model, as pieces of text."""

    def batches(self, idle_s: float) -> AsyncIterator[list[Piece]]:
        """Pieces, a batch per wake-up; an empty batch after each `idle_s` of silence. Called once."""
        ...

    def end(self, finish: Terminal) -> None:
        """End it, here and where it is computed. Does not wait. Safe to call again and after the end."""
        ...


Start: TypeAlias = Callable[[AnyModel, Account], Source]


class Course:
    """`start` begins an answer of one model, or raises why it cannot."""

    def __init__(self, models: Sequence[AnyModel], start: Start, account: Account, log: Logger) -> None:
        self._models = models
        self._start = start
        self._account = account
        self._log = log
        self._source: Source | None = None
        self._finish: Terminal | None = None  # it was ended from outside

    @property
    def fingerprint(self) -> str:
        return "" if self._source is None else self._source.fingerprint

    def end(self, finish: Terminal) -> None:
        """End whatever is being made; nothing is started after that."""
        self._finish = self._finish or finish
        if self._source is not None:
            self._source.end(finish)

    async def whole(self) -> list[Piece]:
        """One finished piece a choice, in order, once all of them have ended."""
        return await whole_of(self.batches(NO_MATTER_S))

    async def batches(self, idle_s: float) -> AsyncIterator[list[Piece]]:
        """As a source's."""
        *others, last = self._models
        for model in others:
            has_spoken = False
            try:
                async for batch in self._begin(model).batches(idle_s):
                    has_spoken = has_spoken or bool(batch)
                    yield batch
                return
            except AntiphonError as error:
                if has_spoken or self._finish is not None or not lacks_capacity(error):
                    raise
                self._account.passed_over.append(model.name)
                self._log.info(
                    "route.fallback", request_id=self._account.request_id, model=model.name, code=error.code
                )
            finally:
                if self._source is not None:
                    self._source.end(Terminal.ABORTED)
        async for batch in self._begin(last).batches(idle_s):
            yield batch

    def _begin(self, model: AnyModel) -> Source:
        if self._finish is not None:
            error = of_output(self._finish, None)
            assert error is not None  # nobody ends a course well from outside
            raise error
        self._account.ask(model.name)
        self._source = self._start(model, self._account)
        return self._source


def lacks_capacity(error: AntiphonError) -> bool:
    """Whether another model might do better: not where the request is wrong or out of time."""
    is_ours = error.status >= 500 and not isinstance(error, DeadlineExceeded)
    return is_ours or isinstance(error, Busy)
