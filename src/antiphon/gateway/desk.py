"""What every generating endpoint needs: models, room, backends, and a safe way to hold answers.

Invariants: what was started has ended when `attend` is left, however it is left; the client's leaving
ends it at once, before the first token too; nothing outlives the request's time.
"""

from __future__ import annotations

import array
import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.types import Receive, Scope

from antiphon.core.generation import Generation, Terminal
from antiphon.core.scope import ScopeMaker
from antiphon.gateway.account import Account
from antiphon.gateway.admission import OpenGate
from antiphon.gateway.callers import Caller
from antiphon.gateway.checkin import CheckIn
from antiphon.gateway.course import Course, Gate, Prepare, Prepared, Work
from antiphon.gateway.mirror import Mirror
from antiphon.gateway.models import AnyModel, RelayedModel, ServedModel, ServedModels, context_too_long
from antiphon.gateway.sampling import sampling_of
from antiphon.gateway.schema import ChatRequest, CompletionRequest, GeneratingRequest
from antiphon.gateway.sse import watch_client
from antiphon.gateway.text import TextStream
from antiphon.gateway.upstreamchat import chat_body
from antiphon.gateway.upstreamtext import BYTES_PER_TOKEN, UpstreamText
from antiphon.gateway.urgency import priority_of, timeout_of
from antiphon.obs.log import Logger
from antiphon.router.answer import Answer
from antiphon.router.backends import Backend
from antiphon.router.targets import session_key
from antiphon.tokens.template import ChatMessage

_MOST_ANSWER_TOKENS = 4096  # where neither the client nor we know better
_SESSION_TOKENS = 512  # reach past most system prompts into what the user said first


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """Bounds of one request."""

    max_body_bytes: int
    timeout_s: float


class Desk:
    """Shared by the endpoints of one gateway."""

    def __init__(
        self,
        models: ServedModels,
        backend: Backend,
        scopes: ScopeMaker,
        bounds: RequestBounds,
        mirror: Mirror,
        log: Logger,
    ) -> None:
        self._models = models
        self._backend = backend
        self._scopes = scopes
        self.bounds = bounds
        self.log = log
        self._mirror = mirror
        self.check_in = CheckIn(models)
        self.gate: Gate = OpenGate()
        self._draw = random.random
        self._courses: set[Course] = set()

    def abort_all(self) -> None:
        """End every open answer, here and where it is computed."""
        for course in tuple(self._courses):
            course.end(Terminal.ABORTED)

    async def receive(self, request: GeneratingRequest, account: Account, scope: Scope) -> None:
        """What every request passes before any work. Raises BadRequest, and what check-in raises."""
        account.priority = priority_of(scope["headers"], request, _caller(account).grant)
        account.timeout_s = timeout_of(scope["headers"], self.bounds.timeout_s)
        await self.check_in(request, account)

    def course(self, request: GeneratingRequest, prepare: Prepare, account: Account) -> Course:
        """The way along the models that may answer; a copy may go elsewhere. Raises NotFound."""
        models = self._choose(request, account)
        if isinstance(request, CompletionRequest):  # for those who take plain text, where there are some
            models = [model for model in models if isinstance(model, ServedModel)] or models
        mirror = self._models.mirror(request.model, self._draw())
        if mirror is not None:
            self._mirror.copy(mirror, prepare, account)
        return Course(models, prepare, account, self.gate, self.log)

    def _choose(self, request: GeneratingRequest, account: Account) -> list[AnyModel]:
        """In the order in which they are asked."""
        account.is_stream = bool(request.stream)
        safety = request.safety_identifier if isinstance(request, ChatRequest) else None
        session = session_key(
            _caller(account).tenant_id, request.prompt_cache_key, request.user, safety, request.cache_salt
        )
        return self._models.choose(request.model, session, self._draw())

    def relay(
        self, request: ChatRequest, messages: Sequence[ChatMessage], model: RelayedModel, account: Account
    ) -> Prepared:
        """An answer of an upstream that is sent messages. Its tokens are a guess."""
        upstream = model.upstream
        salt = upstream.salt_of(self._scope(request, _caller(account))) or request.cache_salt
        body = chat_body(request, messages, upstream.model, salt)
        num_answer_tokens = request.answer_limit or _MOST_ANSWER_TOKENS
        work = Work(len(body) // BYTES_PER_TOKEN, num_answer_tokens, request.n or 1)
        return Prepared(work, lambda: UpstreamText(model, body, request, account))

    def generate(
        self, request: GeneratingRequest, model: ServedModel, prompts: Sequence[list[int]], account: Account
    ) -> Prepared:
        """An answer of ids. Raises BadRequest, ContextTooLong, NoReplica."""
        generations = self._generations(request, model, prompts, account)
        work = Work(
            num_prompt_tokens=account.num_prompt_tokens,
            num_answer_tokens=max(generation.sampling.max_tokens for generation in generations),
            num_choices=sum(generation.n for generation in generations),
        )
        return Prepared(work, partial(self._start_all, generations, model, request.stops, account))

    def _start_all(
        self, generations: Sequence[Generation], model: ServedModel, stops: Sequence[str], account: Account
    ) -> TextStream:
        """Raises BadRequest, NoReplica."""
        account.answers = answers = []
        with ExitStack() as started:  # those before one that cannot start end again
            for generation in generations:
                answer = self._start(msgspec.structs.replace(generation, timeout_s=account.left_s))
                started.callback(answer.abort)
                answers.append(answer)
            started.pop_all()
        return TextStream(answers, model, stops, account, self.log)

    def _generations(
        self, request: GeneratingRequest, model: ServedModel, prompts: Sequence[list[int]], account: Account
    ) -> list[Generation]:
        """One generation a prompt, their ids made here."""
        most = self._backend.most_context_tokens(model.name)
        context_tokens = model.context_tokens if most is None else min(model.context_tokens, most)
        caller = _caller(account)
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
                    priority=account.priority,
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

    @asynccontextmanager
    async def attend(self, course: Course, account: Account, receive: Receive) -> AsyncIterator[None]:
        """Inside, the client's leaving and the end of the request's time end the course; so does the exit."""

        def client_left() -> None:
            account.is_client_gone = True
            course.end(Terminal.ABORTED)

        deadline = asyncio.get_running_loop().call_later(account.left_s, course.end, Terminal.DEADLINE)
        self._courses.add(course)
        try:
            async with watch_client(receive, client_left):
                yield
        finally:
            deadline.cancel()
            self._courses.discard(course)
            course.end(Terminal.ABORTED)

    def _start(self, generation: Generation) -> Answer:
        if generation.sampling.max_tokens == 0:  # a completion may ask for nothing but its prompt's echo
            answer = Answer(generation)
            answer.end(Terminal.LENGTH)
            return answer
        return self._backend.start(generation)


def _caller(account: Account) -> Caller:
    assert account.caller is not None  # CallerMiddleware: no request comes this far without one
    return account.caller


def _session(scope: bytes, request: GeneratingRequest, prompt: Sequence[int]) -> bytes:
    """What stays the same over a conversation: the client's key, else how the prompt begins."""
    begin = b"" if request.prompt_cache_key else array.array("I", prompt[:_SESSION_TOKENS]).tobytes()
    return hashlib.blake2b(scope + begin, digest_size=16).digest()
