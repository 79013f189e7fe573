"""One WebSocket to one worker, kept up for as long as the gateway lives.

Owns the connection, the answers that are open on it and the worker's last report. Invariants: a
link that is up has said who it is; a frame is decoded once and its outputs go to their answers
without a task or a copy per token; a worker that is silent for `LOST_AFTER_S`, or says what cannot
be true, is lost, and every answer open on it is told so exactly once. Does not choose workers and
does not retry answers: that is the dispatcher's.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from antiphon.core.errors import BadRequest, NoReplica
from antiphon.core.generation import Load, Terminal, WorkerInfo
from antiphon.core.wire import (
    HEARTBEAT_S,
    MAX_FRAME_BYTES,
    PROTOCOL,
    Abort,
    Blocks,
    Frame,
    Hello,
    Resync,
    Submit,
    Up,
    decode_up,
    encoder,
)
from antiphon.obs.log import Logger
from antiphon.router.answer import Answer, ProtocolFault
from antiphon.router.policy import ReplicaLoad

LOST_AFTER_S = 3 * HEARTBEAT_S
CONNECT_TIMEOUT_S = 5.0
SEND_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 0.5
BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 1.0
MAX_OUTBOX = 1024  # messages the worker has not taken yet; past that it gets no new work

_TURNED_AWAY = f"{NoReplica.code}:"
_NO_LOAD = Load(0, 0, 0, 0, 0, 0, 0)


def link_url(url: str) -> str:
    """The WebSocket address of a worker given as `http://host:port` or `ws://host:port/link`."""
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(parts.scheme)
    if scheme is None or not parts.netloc or parts.path not in ("", "/", "/link"):
        raise BadRequest(f"{url!r} is not a worker's address: write http://HOST:PORT")
    return f"{scheme}://{parts.netloc}/link"


class LinkListener(Protocol):
    """Who is told what becomes of a link. No call waits."""

    def link_is_up(self, link: WorkerLink) -> None:
        """It has said who it is."""
        ...

    def link_is_down(self, link: WorkerLink) -> None:
        """It is lost, and every answer that was open on it was handed to `answer_is_lost`."""
        ...

    def answer_is_lost(self, link: WorkerLink, answer: Answer) -> None:
        """This answer was open on it and will not go on there."""
        ...

    def on_blocks(self, link: WorkerLink, blocks: Blocks) -> None:
        """The worker says what has become of the blocks it holds."""
        ...


class WorkerLink:
    """A worker as this gateway sees it. `run()` keeps it connected until cancelled."""

    def __init__(self, url: str, secret: str, listener: LinkListener, log: Logger) -> None:
        self.url = link_url(url)
        self.info: WorkerInfo | None = None  # None: down
        self.life = 0  # of the worker; 0: it did not say
        self.load = _NO_LOAD
        self.is_leaving = False  # it was taken off the list: no new work
        self._secret = secret
        self._listener = listener
        self._log = log.bind(worker=self.url)
        self._answers: dict[str, Answer] = {}
        self._num_dispatched = 0  # sequences sent since the last report
        self._was_up = True  # before the attempt that failed; the first failure is news too
        self._outbox: deque[bytes] = deque()
        self._outbox_filled = asyncio.Event()

    @property
    def is_up(self) -> bool:
        return self.info is not None

    @property
    def takes_work(self) -> bool:
        is_open = not self.load.draining and not self.is_leaving
        return self.info is not None and is_open and len(self._outbox) < MAX_OUTBOX

    @property
    def num_open_answers(self) -> int:
        return len(self._answers)

    def replica_load(self) -> ReplicaLoad:
        """What the choice between replicas needs to know of this one."""
        own = sum(answer.num_open_choices for answer in self._answers.values())
        return ReplicaLoad(self.load.running, self.load.waiting, self._num_dispatched, own)

    def submit(self, answer: Answer) -> None:
        """Send a generation down; its answer is this link's from now on. Never waits. Raises NoReplica."""
        if self.info is None or not self.takes_work:
            raise NoReplica("The worker takes no work now; try again.")
        message = encoder.encode(Submit(answer.generation))
        if len(message) > MAX_FRAME_BYTES:
            raise BadRequest("The request is too large for a worker.", code="request_too_large")
        answer.attach(self.info, self._abort)
        self._answers[answer.generation.id] = answer
        self._num_dispatched += answer.num_open_choices
        self._send(message)

    def resync(self) -> None:
        """Ask the worker to say anew which blocks it holds."""
        self._send(encoder.encode(Resync()))

    def abort_all(self) -> None:
        """End every answer that is open on this link, here and at the worker."""
        for answer in list(self._answers.values()):
            answer.abort()

    async def run(self) -> None:
        """Connect, serve, and connect again, with growing pauses while the worker cannot be reached."""
        pause_s = BACKOFF_MIN_S
        while True:
            try:
                await self._serve(await self._connect())
            except InvalidStatus as error:
                self._log.error("link.refused", status=error.response.status_code)
            except (OSError, WebSocketException, TimeoutError, ProtocolFault) as error:
                say = self._log.warning if self._was_up else self._log.debug  # once, not at each attempt
                say("link.down", reason=str(error) or type(error).__name__)
            except Exception:  # noqa: BLE001 - supervisor: a fault of ours costs a connection, not the gateway
                self._log.exception("link.fault")
            if self._was_up:
                pause_s = BACKOFF_MIN_S
                self._was_up = False
            await asyncio.sleep(pause_s * (0.5 + random.random()))
            pause_s = min(2 * pause_s, BACKOFF_MAX_S)

    async def _connect(self) -> ClientConnection:
        return await connect(
            self.url,
            additional_headers={"Authorization": f"Bearer {self._secret}"},
            user_agent_header="antiphon-gateway",
            compression=None,
            open_timeout=CONNECT_TIMEOUT_S,
            ping_interval=None,  # frames are the heartbeat
            max_size=MAX_FRAME_BYTES,
            proxy=None,
        )

    async def _serve(self, socket: ClientConnection) -> None:
        """Read frames until the worker is lost; what ends it is raised."""
        writer = asyncio.create_task(self._write(socket))
        try:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(LOST_AFTER_S) as silence:
                self._greet(_decode(await socket.recv()))
                while not writer.done():
                    silence.reschedule(loop.time() + LOST_AFTER_S)
                    self._take(_decode(await socket.recv()))
        finally:
            self._lose_all()  # before anything that waits
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            await _hang_up(socket)
        writer.result()  # it ended first: raise what ended it

    def _greet(self, message: Up) -> None:
        if not isinstance(message, Hello):
            raise ProtocolFault("the first message was not a Hello")
        if message.protocol != PROTOCOL:
            raise ProtocolFault(f"the worker speaks protocol {message.protocol}, this gateway {PROTOCOL}")
        self.info = message.info
        self.life = message.life
        self._was_up = True
        self._num_dispatched = 0
        self._log.info("link.up", model=message.info.model, name=message.info.worker)
        self._listener.link_is_up(self)

    def _take(self, message: Up) -> None:
        """Hand a frame's outputs to their answers. The hot path: once per engine step, not per answer."""
        if isinstance(message, Blocks):
            self._listener.on_blocks(self, message)
            return
        if not isinstance(message, Frame):
            raise ProtocolFault("a second Hello")
        self.load = message.load
        self._num_dispatched = 0
        answers = self._answers
        for output in message.outputs:
            answer = answers.get(output.generation)
            if answer is None:
                continue  # ended here while the frame was on its way
            if output.finish is Terminal.REFUSED and (output.error or "").startswith(_TURNED_AWAY):
                del answers[output.generation]  # it began to drain when this was on its way down
                self._listener.answer_is_lost(self, answer)
                continue
            answer.deliver(output)
            if answer.is_finished:
                del answers[output.generation]

    async def _write(self, socket: ClientConnection) -> None:
        while True:
            await self._outbox_filled.wait()
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await socket.send(self._outbox[0])
            self._outbox.popleft()
            if not self._outbox:
                self._outbox_filled.clear()

    def _send(self, message: bytes) -> None:
        self._outbox.append(message)
        self._outbox_filled.set()

    def _abort(self, answer: Answer, choice: int | None) -> None:
        generation_id = answer.generation.id
        if self._answers.get(generation_id) is not answer:
            return
        if answer.is_finished:
            del self._answers[generation_id]
            choice = None
        self._send(encoder.encode(Abort(generation_id, choice)))

    def _lose_all(self) -> None:
        was_up = self.info is not None
        self.info = None
        self.load = _NO_LOAD
        self._outbox.clear()
        self._outbox_filled.clear()
        lost, self._answers = self._answers, {}
        for answer in lost.values():
            self._listener.answer_is_lost(self, answer)
        if was_up:
            self._listener.link_is_down(self)


async def _hang_up(socket: ClientConnection) -> None:
    """Say goodbye to a worker that listens; websockets would wait without end for one that does not read."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await socket.close()
    socket.transport.abort()


def _decode(data: bytes | str) -> Up:
    if isinstance(data, str):
        raise ProtocolFault("a text message")
    try:
        return decode_up(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolFault(f"a message that does not decode: {error}") from error
