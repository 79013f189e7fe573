"""What every generating endpoint needs: models, room, workers, and a safe way to hold answers.

Invariants: answers that were started have ended when `answers` is left, however it is left; the
client's leaving ends them at once, before the first token too; none outlives the request's time.
"""

from __future__ import annotations

import array
import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.types import Receive

from antiphon.core.generation import Generation, Terminal
from antiphon.core.scope import ScopeMaker
from antiphon.gateway.account import Account
from antiphon.gateway.callers import Caller
from antiphon.gateway.models import ServedModel, ServedModels, context_too_long
from antiphon.gateway.sampling import sampling_of
from antiphon.gateway.schema import GeneratingRequest
from antiphon.gateway.sse import watch_client
from antiphon.obs.log import Logger
from antiphon.router.answer import Answer
from antiphon.router.dispatch import Dispatcher
from antiphon.router.picker import no_replica

_SESSION_TOKENS = 512  # reach past most system prompts into what the user said first


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one request."""

    max_body_bytes: int
    timeout_s: float


class Desk:
    """Shared by the endpoints of one gateway."""

    def __init__(
        self,
        models: ServedModels,
        dispatcher: Dispatcher,
        scopes: ScopeMaker,
        limits: Limits,
        log: Logger,
    ) -> None:
        self._models = models
        self._dispatcher = dispatcher
        self._scopes = scopes
        self.limits = limits
        self.log = log

    def find_model(self, request: GeneratingRequest, account: Account) -> ServedModel:
        """The model asked for; the account is this model's from now on. Raises NotFound."""
        model = self._models.find(request.model)
        account.model = model.name
        account.is_stream = bool(request.stream)
        return model

    def generations(
        self, request: GeneratingRequest, model: ServedModel, prompts: Sequence[list[int]], account: Account
    ) -> list[Generation]:
        """One generation a prompt, their ids made here. Raises BadRequest, ContextTooLong, NoReplica."""
        context_tokens = self._context_tokens(model)
        caller = account.caller
        assert caller is not None  # CallerMiddleware: no request comes this far without one
        scope = self._scope(request, caller)
        generations = []
        for number, prompt in enumerate(prompts):
            room = context_tokens - len(prompt)
            if room < 1:
                raise context_too_long(context_tokens, str(len(prompt)), request.PROMPT_FIELD)
            account.num_prompt_tokens += len(prompt)
            generations.append(
                Generation(
                    id=f"{account.request_id}-{number}",
                    model=model.name,
                    sampling=sampling_of(request, model, room),
                    token_ids=prompt,
                    num_prompt_tokens=len(prompt),
                    num_public_tokens=model.num_public_tokens(prompt),
                    scope=scope,
                    session=_session(scope, request, prompt),
                    tenant=caller.tenant,
                    timeout_s=self.limits.timeout_s,
                    n=request.n or 1,
                )
            )
        return generations

    def _scope(self, request: GeneratingRequest, caller: Caller) -> bytes:
        """Whose KV this request may use. Names of end users (`user`, `safety_identifier`) do not enter it."""
        return self._scopes.scope(
            caller.tenant_id,
            cache_salt=request.cache_salt,
            prompt_cache_key=request.prompt_cache_key or None,
        )

    def _context_tokens(self, model: ServedModel) -> int:
        """What every worker of this model can hold: which one takes the request is not known yet."""
        workers = self._dispatcher.fleet.workers(model.name)
        if not workers:
            raise no_replica(model.name)
        return min([model.context_tokens, *(worker.context_tokens for worker in workers)])

    @asynccontextmanager
    async def answers(
        self, generations: Sequence[Generation], account: Account, receive: Receive
    ) -> AsyncIterator[list[Answer]]:
        """Start them all and see to it that they end. Raises NoReplica."""
        answers: list[Answer] = []
        account.answers = answers

        def end(finish: Terminal) -> None:
            for answer in answers:
                answer.abort(finish=finish)

        def client_left() -> None:
            account.is_client_gone = True
            end(Terminal.ABORTED)

        deadline = asyncio.get_running_loop().call_later(self.limits.timeout_s, end, Terminal.DEADLINE)
        try:
            for generation in generations:
                answers.append(self._start(generation))
            async with watch_client(receive, client_left):
                yield answers
        finally:
            deadline.cancel()
            end(Terminal.ABORTED)

    def _start(self, generation: Generation) -> Answer:
        if generation.sampling.max_tokens == 0:  # a completion may ask for nothing but its prompt's echo
            answer = Answer(generation)
            answer.end(Terminal.LENGTH)
            return answer
        return self._dispatcher.start(generation)


def _session(scope: bytes, request: GeneratingRequest, prompt: Sequence[int]) -> bytes:
    """What stays the same over a conversation: the client's key, else how the prompt begins."""
    begin = b"" if request.prompt_cache_key else array.array("I", prompt[:_SESSION_TOKENS]).tobytes()
    return hashlib.blake2b(scope + begin, digest_size=16).digest()


def fingerprint_of(answer: Answer) -> str:
    """Same fingerprint and seed, same text: it names the weights and the engine that computes them."""
    worker = answer.worker
    what = "" if worker is None else "\0".join((worker.revision, worker.engine, worker.version))
    return f"fp_{hashlib.sha256(what.encode()).hexdigest()[:12]}"
