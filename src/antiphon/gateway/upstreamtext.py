"""The text of one chat that an upstream answers by messages: its events as the pieces of our own stream.

Owns the call, a task that reads it and the little that is read ahead: where the client is slow, the
upstream waits. Invariants: each choice has one piece with `finish`, its last; an answer that stops before
every choice has ended raises, as does one that is not what was asked for; `end` closes the connection
at once.

Without usage from the upstream its tokens are estimated, and the account says so.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator

import msgspec

from antiphon.core.errors import AntiphonError
from antiphon.core.generation import Terminal
from antiphon.gateway.account import Account
from antiphon.gateway.errors import of_output
from antiphon.gateway.models import RelayedModel
from antiphon.gateway.reply import TokenLogprob
from antiphon.gateway.schema import ChatRequest
from antiphon.gateway.text import Piece
from antiphon.gateway.upstreamchat import Chunk, ChunkChoice, ChunkUsage, read_chunk
from antiphon.router.upstreamerrors import of_event, senseless

MAX_AHEAD = 64 * 1024  # characters read that the client has not taken
BYTES_PER_TOKEN = 4  # of an estimate


class UpstreamText:
    """One answer. A source of pieces, made for one reader."""

    def __init__(self, model: RelayedModel, body: bytes, request: ChatRequest, account: Account) -> None:
        self._upstream = model.upstream
        self._body = body
        self._wants_scores = bool(request.logprobs)
        self._account = account
        self._open = [True] * (request.n or 1)
        self._fingerprint = ""
        self._usage = ChunkUsage()
        self._ready: list[Piece] = []
        self._num_ahead = 0
        self._changed = asyncio.Event()  # for the reader
        self._taken = asyncio.Event()  # for the task
        self._task: asyncio.Task[None] | None = None
        self._finish: Terminal | None = None  # it was ended from outside

    @property
    def fingerprint(self) -> str:
        """Of the server's name and what it says of itself."""
        what = "\0".join((self._upstream.name, self._upstream.model, self._fingerprint))
        return f"fp_{hashlib.sha256(what.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"

    def end(self, finish: Terminal) -> None:
        """End it: the connection closes."""
        self._finish = self._finish or finish
        if self._task is not None:
            self._task.cancel()
        self._changed.set()

    async def batches(self, idle_s: float) -> AsyncIterator[list[Piece]]:
        """Pieces, a batch per wake-up; an empty batch after each `idle_s` of silence. Called once."""
        self._task = task = asyncio.create_task(self._read(), name=f"upstream {self._upstream.name}")
        task.add_done_callback(lambda _: self._changed.set())
        try:
            while True:
                if self._finish is not None:
                    raise self._ended(self._finish)
                if self._ready:
                    yield self._take()
                elif task.done():
                    if task.exception() is not None:
                        self._account.finishes.append(Terminal.ERROR)
                    task.result()
                    return
                elif await _is_silent(self._changed, idle_s):
                    yield []
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _ended(self, finish: Terminal) -> AntiphonError:
        self._account.finishes.append(finish)
        error = of_output(finish, None)
        assert error is not None  # nobody ends an answer well from outside
        return error

    def _take(self) -> list[Piece]:
        pieces, self._ready = self._ready, []
        self._num_ahead = 0
        self._taken.set()
        return pieces

    async def _read(self) -> None:
        url = f"{self._upstream.settings.url.rstrip('/')}/chat/completions"
        try:
            async with self._upstream.call(url, self._body) as call:
                async for data in call:
                    chunk = self._decoded(data)
                    if any(choice.is_progress for choice in chunk.choices):
                        call.heard()
                    for choice in chunk.choices:
                        self._say(choice)
                    await self._until_wanted()
                if any(self._open):
                    raise senseless(self._upstream.name)
        finally:
            self._book()

    def _decoded(self, data: bytes) -> Chunk:
        name = self._upstream.name
        try:
            chunk = read_chunk(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise senseless(name) from None  # no cause: it quotes the event
        if chunk.fault is not None:
            raise of_event(name, chunk.fault)
        self._fingerprint = self._fingerprint or chunk.system_fingerprint or ""
        if chunk.usage is not None:
            self._usage = _merged(self._usage, chunk.usage)
        return chunk

    def _say(self, choice: ChunkChoice) -> None:
        number = choice.index
        try:
            finish = choice.finish
        except KeyError:
            raise senseless(self._upstream.name) from None
        if not 0 <= number < len(self._open) or choice.calls_tools:
            raise senseless(self._upstream.name)
        if not self._open[number]:
            return
        scores: list[TokenLogprob] = choice.scores() if self._wants_scores else []
        if choice.text or scores:
            self._account.count_tokens(len(scores) or 1)
        if finish is not None:
            self._open[number] = False
            self._account.finishes.append(finish)
        if choice.text or scores or finish is not None:
            self._ready.append(Piece(number, choice.text, scores, finish))
            self._num_ahead += len(choice.text)
            self._changed.set()

    async def _until_wanted(self) -> None:
        while self._num_ahead > MAX_AHEAD:
            self._taken.clear()
            await self._taken.wait()

    def _book(self) -> None:
        """The server's own count is the one that stands."""
        usage, account = self._usage, self._account
        if usage.prompt_tokens is None or usage.completion_tokens is None:
            account.is_usage_estimated = True
        if usage.prompt_tokens is None:
            account.num_prompt_tokens = math.ceil(len(self._body) / BYTES_PER_TOKEN)
        else:
            account.num_prompt_tokens = usage.prompt_tokens
        if usage.completion_tokens is not None:
            account.num_answer_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            account.num_cached_tokens = usage.prompt_tokens_details.cached_tokens or 0


async def _is_silent(changed: asyncio.Event, idle_s: float) -> bool:
    """Wait for a change; whether there was none for so long."""
    try:
        async with asyncio.timeout(idle_s):
            await changed.wait()
    except TimeoutError:
        return True
    changed.clear()
    return False


def _merged(old: ChunkUsage, new: ChunkUsage) -> ChunkUsage:
    """Each figure as it was said last: servers spread them over several events."""
    said = {name: value for name, value in msgspec.structs.asdict(new).items() if value is not None}
    return msgspec.structs.replace(old, **said)
