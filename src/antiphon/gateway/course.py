"""One request on its way along the models that may answer it.

Each model is prepared for (its tokens counted), then the gate gives a place, then it starts. The first
model that begins to answer is the one that answers: where it fails before its first word for want of
capacity, the next is asked, and the client sees nothing of it. Only at the last one a request waits for a
place: a model that has one now is better than one that will have. Invariants: no model is asked after a word
has left, after the client has left, or for a mistake of the client's; a source that was started has ended
when the next one starts; the account is that of the model that is asked now.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from antiphon.core.errors import AntiphonError, Busy, DeadlineExceeded
from antiphon.core.generation import Terminal
from antiphon.gateway.account import Account
from antiphon.gateway.errors import of_output
from antiphon.gateway.models import AnyModel
from antiphon.gateway.text import NO_MATTER_S, Piece, whole_of
from antiphon.obs.log import Logger
from antiphon.router.admission import EXPIRED

STOPPING = "rejected-stopping"


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


@dataclass(frozen=True, slots=True)
class Work:
    """How much a request is. `num_answer_tokens`: the most that each choice may have."""

    num_prompt_tokens: int
    num_answer_tokens: int
    num_choices: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """An answer that can be started, once. `start` does not wait; it raises why it cannot."""

    work: Work
    start: Callable[[], Source]


class Entry(Protocol):
    """A request at the gate of one model."""

    async def source(self) -> Source:
        """Its answer, once it was started. Called once. Raises why it is not."""
        ...

    def end(self, finish: Terminal) -> None:
        """It waits no more, or what was started ends. Safe to call again and after the end."""
        ...


class Gate(Protocol):
    """Gives places. `may_wait`: else a request that finds none is refused at once."""

    def enter(self, model: str, prepared: Prepared, account: Account, *, may_wait: bool) -> Entry:
        """Ask for a place. Raises why there is none, and will be none."""
        ...


Prepare: TypeAlias = Callable[[AnyModel, Account], Prepared]


class Course:
    """`prepare` makes an answer of one model ready, or raises why it cannot."""

    def __init__(
        self, models: Sequence[AnyModel], prepare: Prepare, account: Account, gate: Gate, log: Logger
    ) -> None:
        self._models = models
        self._prepare = prepare
        self._account = account
        self._gate = gate
        self._log = log
        self._entry: Entry | None = None
        self._source: Source | None = None
        self._finish: Terminal | None = None  # it was ended from outside

    @property
    def fingerprint(self) -> str:
        return "" if self._source is None else self._source.fingerprint

    def end(self, finish: Terminal) -> None:
        """End whatever is waited for or being made; nothing is started after that."""
        self._finish = self._finish or finish
        if self._entry is not None:
            self._entry.end(finish)

    async def whole(self) -> list[Piece]:
        """One finished piece a choice, in order, once all of them have ended."""
        return await whole_of(self.batches(NO_MATTER_S))

    async def batches(self, idle_s: float) -> AsyncIterator[list[Piece]]:
        """As a source's."""
        *others, last = self._models
        for model in others:
            has_spoken = False
            try:
                source = await self._begin(model, may_wait=False)
                async for batch in source.batches(idle_s):
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
                if self._entry is not None:
                    self._entry.end(Terminal.ABORTED)
        source = await self._begin(last, may_wait=True)
        async for batch in source.batches(idle_s):
            yield batch

    async def _begin(self, model: AnyModel, *, may_wait: bool) -> Source:
        self._entry = None
        self._check()
        self._account.ask(model.name)
        prepared = self._prepare(model, self._account)
        self._entry = self._gate.enter(model.name, prepared, self._account, may_wait=may_wait)
        self._source = await self._entry.source()
        self._check()  # it was ended while the place was on its way here
        return self._source

    def _check(self) -> None:
        """Raises where it was ended from outside."""
        if self._finish is not None:
            raise ended(self._finish)


def ended(finish: Terminal) -> AntiphonError:
    """The error for one that was ended from outside before it began."""
    error = of_output(finish, None)
    assert error is not None  # nobody ends a course well from outside
    error.dropped_reason = EXPIRED if finish is Terminal.DEADLINE else STOPPING
    return error


def lacks_capacity(error: AntiphonError) -> bool:
    """Whether another model might do better: not where the request is wrong or out of time."""
    is_ours = error.status >= 500 and not isinstance(error, DeadlineExceeded)
    return is_ours or isinstance(error, Busy)
