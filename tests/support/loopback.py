"""A worker whose every word a test decides: a real WebSocket server that speaks core/wire.py.

By default it says a text, a byte a step (`ByteTokenizer` ids), as a well-behaved worker would. A
`Script` replaces that; hostile ones send whatever bytes they like through `Session.raw`.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from websockets.asyncio.server import Request, Response, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from antiphon.core.generation import (
    CachedTokens,
    Generation,
    Load,
    StepOutput,
    Terminal,
    TokenLogprobs,
    WorkerInfo,
)
from antiphon.core.wire import (
    PROTOCOL,
    Abort,
    Blocks,
    Down,
    Forget,
    Frame,
    Hello,
    Resync,
    Submit,
    decode_down,
    encoder,
)

SECRET = "a secret of these tests"
HEARTBEAT_S = 0.05
IDLE = Load(0, 0, 0, 0, 4096, 0, 0)


def worker_info(model: str = "scripted", **fields: object) -> WorkerInfo:
    """What a loopback worker says of itself."""
    values: dict[str, object] = {
        "worker": "loopback",
        "model": model,
        "revision": "r1",
        "namespace": "ns",
        "engine": "loopback",
        "version": "1",
        "context_tokens": 4096,
        "block_tokens": 32,
        "num_blocks": 4096,
        "max_sequences": 256,  # gateways hold nothing back from it
    }
    return WorkerInfo(**(values | fields))


class Session:
    """One connected gateway, as a script sees it."""

    def __init__(self, socket: ServerConnection) -> None:
        self._socket = socket
        self.load = IDLE

    async def send(self, *outputs: StepOutput) -> None:
        """One frame."""
        await self._socket.send(encoder.encode(Frame(list(outputs), self.load)))

    async def tell(self, blocks: Blocks) -> None:
        """News of its blocks."""
        await self._socket.send(encoder.encode(blocks))

    async def raw(self, message: bytes | str) -> None:
        """Anything at all."""
        await self._socket.send(message)

    async def close(self) -> None:
        """Drop the gateway, as a dying worker would."""
        self._socket.transport.abort()


Script = Callable[[Session, Generation], Awaitable[None]]


def saying(
    text: str | bytes, *, per_step: int = 1, finish: Terminal = Terminal.STOP, cached: int = 0
) -> Script:
    """Every choice says this text, `per_step` bytes a frame, then ends (by LENGTH where it is too long)."""
    ids = list(text.encode() if isinstance(text, str) else text)

    async def script(session: Session, generation: Generation) -> None:
        for frame in frames_of(generation, ids, per_step, finish, cached):
            await session.send(*frame)

    return script


def frames_of(
    generation: Generation, ids: Sequence[int], per_step: int, finish: Terminal, cached: int = 0
) -> list[list[StepOutput]]:
    """The frames of a well-behaved answer in which each choice says the same ids, from what was received."""
    sampling = generation.sampling
    num_received = len(generation.token_ids) - generation.num_prompt_tokens
    said = list(ids[: sampling.max_tokens])
    end = finish if len(said) == len(ids) else Terminal.LENGTH
    scores = [TokenLogprobs(-0.5, [(i, -0.5), (97, float("-inf"))][: sampling.logprobs]) for i in said]
    frames = []
    for at in range(num_received, len(said), per_step):
        part = slice(at, at + per_step)
        frames.append(
            [
                StepOutput(
                    generation.id,
                    choice,
                    at,
                    said[part],
                    logprobs=scores[part] if sampling.logprobs is not None else None,
                    cached=CachedTokens(engine=cached) if at == num_received else None,
                    queued_s=0.25 if at == num_received else None,
                )
                for choice in generation.choices
            ]
        )
    last = [StepOutput(generation.id, choice, len(said), [], end) for choice in generation.choices]
    return [*frames, last]


async def silent(session: Session, generation: Generation) -> None:
    """Takes the request and never answers."""
    await asyncio.Event().wait()


class LoopbackWorker:
    """The server. `submits` and `aborts` hold what gateways sent, in order."""

    def __init__(self, script: Script, info: WorkerInfo | None = None) -> None:
        self.script = script
        self.info = info or worker_info()
        self.protocol = PROTOCOL
        self.beats = True
        self.reads = True
        self.submits: asyncio.Queue[Generation] = asyncio.Queue()
        self.aborts: asyncio.Queue[Abort] = asyncio.Queue()
        self.resyncs: asyncio.Queue[Session] = asyncio.Queue()  # who was asked
        self.forgets: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self.takes_forget = True
        self.life = 1
        self.first_words: list[Blocks] = []  # said to each gateway after the Hello
        self.sessions: list[Session] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[LoopbackWorker]:
        """Listen until the block ends; on the same port when entered again."""
        options = {"process_request": self._authorise, "compression": None, "ping_interval": None}
        async with serve(self._serve, "127.0.0.1", self.port, **options) as server:
            self.port = server.sockets[0].getsockname()[1]
            try:
                yield self
            finally:
                for session in self.sessions:
                    await session.close()
                self.sessions.clear()

    def _authorise(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/link" and request.headers.get("Authorization") == f"Bearer {SECRET}":
            return None
        return connection.respond(http.HTTPStatus.FORBIDDEN, "wrong secret\n")

    async def _serve(self, socket: ServerConnection) -> None:
        session = Session(socket)
        self.sessions.append(session)
        tasks: dict[str, asyncio.Task[None]] = {}
        with contextlib.suppress(ConnectionClosed):
            await socket.send(encoder.encode(Hello(self.protocol, self.info, self.life, self.takes_forget)))
            for blocks in self.first_words:
                await session.tell(blocks)
            beat = asyncio.create_task(self._beat(session))
            try:
                if not self.reads:
                    await socket.wait_closed()
                async for message in socket:
                    self._take(decode_down(message), session, tasks)
            finally:
                for task in (beat, *tasks.values()):
                    task.cancel()
                await asyncio.gather(beat, *tasks.values(), return_exceptions=True)

    def _take(self, message: Down, session: Session, tasks: dict[str, asyncio.Task[None]]) -> None:
        if isinstance(message, Resync):
            self.resyncs.put_nowait(session)
        elif isinstance(message, Forget):
            self.forgets.put_nowait(message.tenants)
        elif isinstance(message, Submit):
            generation = message.generation
            self.submits.put_nowait(generation)
            tasks[generation.id] = asyncio.create_task(self.script(session, generation))
        else:
            self.aborts.put_nowait(message)
            if message.choice is None and message.generation in tasks:
                tasks[message.generation].cancel()

    async def _beat(self, session: Session) -> None:
        while self.beats:
            await session.send()
            await asyncio.sleep(HEARTBEAT_S)
