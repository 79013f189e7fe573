"""An upstream that takes token ids, as a backend: generations in, answers filled from its events.

Each choice is a request of its own, read by a task of its own. Invariants: a choice that ends here, for
whatever reason, has its connection closed at once; a fault ends the choice as a refusal that carries the
error, so that the gateway can say it, or ask another model where nothing has been said yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from antiphon.core.errors import AntiphonError, refusal_of
from antiphon.core.generation import CachedTokens, Generation, StepOutput, Terminal, WorkerInfo
from antiphon.router.answer import Answer, ProtocolFault
from antiphon.router.attempt import Attempt
from antiphon.router.upstream import Upstream, UpstreamCall
from antiphon.router.upstreamdialects import Dialect, Heard, Unheard
from antiphon.router.upstreamerrors import of_event, senseless


class IdsUpstream:
    """A backend. Owned by one event loop."""

    def __init__(self, upstream: Upstream, dialect: Dialect, context_tokens: int) -> None:
        self._upstream = upstream
        self._dialect = dialect
        self._url = dialect.url(upstream.settings.url)
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._info = WorkerInfo(
            worker=upstream.name,
            model=upstream.name,
            revision=upstream.model,
            namespace="",  # it shares no KV with workers
            engine=dialect.name,
            version="",
            context_tokens=context_tokens,
            block_tokens=1,
            num_blocks=0,
            max_sequences=upstream.settings.max_in_flight,
        )

    def most_context_tokens(self, model: str) -> int | None:
        return None

    def start(self, generation: Generation) -> Answer:
        """Begin. Raises BadRequest for a wish that this server cannot fulfil."""
        salt = self._upstream.salt_of(generation.scope)
        bodies = {
            choice: self._dialect.body(generation, choice, self._upstream.model, salt)
            for choice in generation.choices
        }
        answer = Answer(generation)
        attempt = Attempt(answer, generation)
        attempt.attach(self._info, self._abort)
        for choice, body in bodies.items():
            key = (generation.id, choice)
            task = asyncio.create_task(self._compute(attempt, choice, body), name=f"upstream {key}")
            self._tasks[key] = task
            task.add_done_callback(self._end(answer, choice))
        return answer

    def _end(self, answer: Answer, choice: int) -> Callable[[asyncio.Task[None]], None]:
        """Whatever became of the task, the choice has ended."""

        def end(task: asyncio.Task[None]) -> None:
            self._tasks.pop((answer.generation.id, choice), None)
            error = None if task.cancelled() else task.exception()
            if error is not None:
                self._upstream.log.error("upstream.broken", exc_info=error)
            answer.end(Terminal.ABORTED if task.cancelled() else Terminal.ERROR, choice)

        return end

    def _abort(self, attempt: Attempt, choice: int | None) -> None:
        for number in attempt.generation.choices if choice is None else (choice,):
            task = self._tasks.get((attempt.generation.id, number))
            if task is not None:
                task.cancel()

    async def _compute(self, attempt: Attempt, choice: int, body: bytes) -> None:
        try:
            async with self._upstream.call(self._url, body) as call:
                await self._listen(attempt, choice, call)
        except AntiphonError as error:
            attempt.answer.end(Terminal.REFUSED, choice, refusal_of(error))

    async def _listen(self, attempt: Attempt, choice: int, call: UpstreamCall) -> None:
        listener = self._dialect.listener(attempt.generation)
        last: Heard | None = None  # with the end, which leaves after the count that comes behind it
        num_cached = 0
        async for event in call:
            try:
                heard = listener.hear(event)
                if heard.error is not None:
                    raise of_event(self._upstream.name, heard.error)
                num_cached = heard.num_cached if heard.num_cached is not None else num_cached
                if heard.ids:
                    call.heard()
                    self._deliver(attempt, choice, heard)
            except (Unheard, ProtocolFault) as fault:
                self._upstream.log.warning("upstream.senseless", reason=str(fault))
                raise senseless(self._upstream.name) from fault
            last = heard if heard.finish is not None else last
        if last is None or not attempt.has(choice):
            raise senseless(self._upstream.name)
        position = len(attempt.answer.received[choice])
        cached = CachedTokens(engine=num_cached)
        end = StepOutput(attempt.generation.id, choice, position, [], last.finish, cached=cached)
        attempt.deliver(end)

    def _deliver(self, attempt: Attempt, choice: int, heard: Heard) -> None:
        wants_scores = attempt.generation.sampling.logprobs is not None
        position = len(attempt.answer.received[choice])
        attempt.deliver(
            StepOutput(
                attempt.generation.id,
                choice,
                position,
                heard.ids,
                logprobs=heard.logprobs if wants_scores else None,
            )
        )
