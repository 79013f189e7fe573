"""One WebSocket to one worker, kept up for as long as the gateway lives.

Owns the connection, the attempts that are open on it and the worker's last report. Invariants: a
link that is up has said who it is; a frame is decoded once and its outputs go to their answers
without a task or a copy per token; a worker that is silent for `LOST_AFTER_S`, or says what cannot
be true, is lost, and its listener gets every attempt that was open on it exactly once; so it does
where a worker says that it will not finish one. Does not choose workers and does not retry: that is
the dispatcher's.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from antiphon.core.errors import BadRequest, NoReplica
from antiphon.core.generation import Load, StepOutput, Terminal, WorkerInfo
from antiphon.core.wire import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    Abort,
    Blocks,
    Forget,
    Frame,
    Hello,
    Resync,
    Submit,
    Up,
    decode_up,
    encoder,
)
from antiphon.obs.log import Logger
from antiphon.router.answer import ProtocolFault
from antiphon.router.attempt import Attempt
from antiphon.router.policy import ReplicaState

LOST_AFTER_S = 3.0
CONNECT_TIMEOUT_S = 5.0
SEND_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 0.5
BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 1.0
MAX_OUTBOX = 1024  # messages the worker has not taken yet; past that it gets no new work

_TURNED_AWAY = f"{NoReplica.code}:"
_FAILURES = frozenset({Terminal.LOST, Terminal.ERROR, Terminal.ABORTED, Terminal.REFUSED})
_GOOD_ENDS = frozenset({Terminal.STOP, Terminal.LENGTH, Terminal.TOOL_CALLS, Terminal.CONTENT_FILTER})
_NO_LOAD = Load(0, 0, 0, 0, 0, 0, 0)


def link_url(url: str) -> str:
    """The WebSocket address of a worker given as `http://host:port` or `ws://host:port/link`."""
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(parts.scheme)
    if scheme is None or not parts.netloc or parts.path not in ("", "/", "/link"):
        raise BadRequest(f"{url!r} is not a worker's address: write http://HOST:PORT")
    return f"{scheme}://{parts.netloc}/link"


@dataclass(slots=True)
class Failure:
    """Choices of an attempt that its worker will not finish, and its word on it."""

    attempt: Attempt
    finish: Terminal
    error: str | None
    choices: list[int] = field(default_factory=list)


class LinkListener(Protocol):
    """Who is told what becomes of a link. No call waits."""

    def link_is_up(self, link: WorkerLink) -> None:
        """It has said who it is."""
        ...

    def link_is_down(self, link: WorkerLink, lost: Sequence[Attempt], *, was_draining: bool) -> None:
        """It is lost, and with it these attempts, which it holds no more."""
        ...

    def attempts_failed(self, link: WorkerLink, failures: Sequence[Failure]) -> None:
        """The worker says, in one frame, that it will not finish these. The link holds them no more."""
        ...

    def load_changed(self, link: WorkerLink) -> None:
        """It reported, was sent work, or may be sent none any more."""
        ...

    def on_blocks(self, link: WorkerLink, blocks: Blocks) -> None:
        """The worker says what has become of the blocks it holds."""
        ...


class WorkerLink:
    """A worker as this gateway sees it. `run()` keeps it connected until cancelled."""

    def __init__(self, url: str, secret: str, listener: LinkListener, log: Logger, replica: int = 0) -> None:
        """`replica` is its number among the links of a gateway."""
        self.replica = replica
        self.url = link_url(url)
        self.info: WorkerInfo | None = None  # None: down
        self.life = 0  # of the worker; 0: it did not say
        self.load = _NO_LOAD
        self.heard_s = 0.0  # when it spoke last, by the loop's clock
        self.num_completed = 0  # answers it brought to a good end
        self.is_leaving = False  # it was taken off the list: no new work
        self.is_suspect = False  # it is silent: no new work
        self.is_barred = False  # its answers fail: no new work
        self._takes_forget = False  # an older one does not
        self._is_dying = False  # its engine is dead, and it will follow
        self.tls: ssl.SSLContext | None = None  # checks a worker at an https address; None: the system does
        self._secret = secret
        self._listener = listener
        self._log = log.bind(worker=self.url)
        self._attempts: dict[str, Attempt] = {}  # by generation id
        self._num_dispatched = 0  # sequences sent since the last report …
        self._dispatched_tokens = 0  # … and tokens to be computed for them
        self._was_up = True  # before the attempt that failed; the first failure is news too
        self._outbox: deque[bytes] = deque()
        self._outbox_filled = asyncio.Event()

    @property
    def is_up(self) -> bool:
        return self.info is not None

    @property
    def takes_work(self) -> bool:
        if self.info is None or self.is_suspect or self.is_barred or self.is_leaving or self._is_dying:
            return False
        return not self.load.draining and len(self._outbox) < MAX_OUTBOX

    @property
    def num_open_answers(self) -> int:
        return len(self._attempts)

    @property
    def attempts(self) -> list[Attempt]:
        """Those that are open on it."""
        return list(self._attempts.values())

    @property
    def name(self) -> str:
        """What people call it."""
        return self.url if self.info is None else self.info.worker

    def state(self) -> ReplicaState:
        """What the choice between replicas needs to know of this one."""
        info, load = self.info, self.load
        # A report may have left before what was sent last came in: what has not answered is still to do.
        pending = sum(attempt.num_tokens for attempt in self._attempts.values() if not attempt.has_spoken)
        return ReplicaState(
            replica=self.replica,
            running=load.running,
            waiting=load.waiting,
            waiting_tokens=load.waiting_tokens,
            dispatched=self._num_dispatched,
            dispatched_tokens=max(self._dispatched_tokens, pending - load.waiting_tokens),
            own=sum(attempt.num_open_choices for attempt in self._attempts.values()),
            free_blocks=load.free_blocks + load.cached_blocks,
            num_blocks=0 if info is None else info.num_blocks,
            max_sequences=0 if info is None else info.max_sequences,
            rates=load.rates,
            cached_blocks=load.cached_blocks,
        )

    def submit(self, attempt: Attempt, num_tokens: int = 0) -> None:
        """Send a generation down; it is this link's from now on. Never waits. Raises NoReplica, BadRequest.

        `num_tokens` are expected to be computed before it answers: counted as work until the next report.
        """
        if self.info is None or not self.takes_work:
            raise NoReplica("The worker takes no work now; try again.")
        message = encoder.encode(Submit(attempt.generation))
        if len(message) > MAX_FRAME_BYTES:
            raise BadRequest("The request is too large for a worker.", code="request_too_large")
        attempt.attach(self.info, self._abort)
        self._attempts[attempt.generation.id] = attempt
        self._num_dispatched += attempt.num_open_choices
        self._dispatched_tokens += num_tokens
        attempt.num_tokens = num_tokens
        self._listener.load_changed(self)
        self._send(message)

    def resync(self) -> None:
        """Ask the worker to say anew which blocks it holds."""
        self._send(encoder.encode(Resync()))

    def forget(self, tenants: Collection[bytes]) -> bool:
        """Have the worker drop what it holds of these tenants; False where it cannot be told."""
        if self.info is None or not self._takes_forget or len(self._outbox) >= MAX_OUTBOX:
            return False
        self._send(encoder.encode(Forget(list(tenants))))
        return True

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
            ssl=(self.tls or True) if self.url.startswith("wss:") else None,
        )

    async def _serve(self, socket: ClientConnection) -> None:
        """Read frames until the worker is lost; what ends it is raised."""
        writer = asyncio.create_task(self._write(socket))
        try:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(LOST_AFTER_S) as silence:
                message = _decode(await socket.recv())
                self.heard_s = loop.time()
                self._greet(message)
                while not writer.done():
                    silence.reschedule(self.heard_s + LOST_AFTER_S)
                    message = _decode(await socket.recv())
                    self.heard_s = loop.time()
                    self._take(message)
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
        self._takes_forget = message.takes_forget
        self._was_up = True
        self.is_suspect = self._is_dying = False
        self._num_dispatched = self._dispatched_tokens = 0
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
        self._num_dispatched = self._dispatched_tokens = 0
        attempts = self._attempts
        failures: dict[str, Failure] = {}
        for output in message.outputs:
            attempt = attempts.get(output.generation)
            if attempt is None:
                continue  # ended here while the frame was on its way
            if output.finish in _FAILURES and not _is_final(output):
                self._note_failure(attempt, output, failures)
                continue
            attempt.heard_s = self.heard_s
            attempt.deliver(output)
            if output.finish is not None:
                self.num_completed += output.finish in _GOOD_ENDS
                if attempt.is_finished:
                    attempts.pop(output.generation, None)
        self._listener.load_changed(self)
        if failures:
            self._is_dying |= any(failure.finish is Terminal.LOST for failure in failures.values())
            self._listener.attempts_failed(self, list(failures.values()))

    def _note_failure(self, attempt: Attempt, output: StepOutput, failures: dict[str, Failure]) -> None:
        assert output.finish is not None
        name = attempt.generation.id
        if output.choice not in attempt.generation.choices:
            raise ProtocolFault(f"choice {output.choice} of a generation without it")
        if not attempt.has(output.choice):
            return  # ended here, or taken away, while the frame was on its way
        if name not in failures:
            failures[name] = Failure(attempt, output.finish, output.error)
        failures[name].choices.append(output.choice)
        attempt.take_away((output.choice,))
        if attempt.is_finished:
            self._attempts.pop(name, None)

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

    def _abort(self, attempt: Attempt, choice: int | None) -> None:
        name = attempt.generation.id
        if self._attempts.get(name) is not attempt:
            return
        if attempt.is_finished:
            del self._attempts[name]
            choice = None
        self._send(encoder.encode(Abort(name, choice)))

    def _lose_all(self) -> None:
        was_up, was_draining = self.info is not None, self.load.draining
        self.info = None
        self.load = _NO_LOAD
        self._outbox.clear()
        self._outbox_filled.clear()
        lost, self._attempts = self._attempts, {}
        if was_up:
            self._listener.link_is_down(self, list(lost.values()), was_draining=was_draining)


def _is_final(output: StepOutput) -> bool:
    """A refusal that any other worker would repeat."""
    return output.finish is Terminal.REFUSED and not (output.error or "").startswith(_TURNED_AWAY)


async def _hang_up(socket: ClientConnection) -> None:
    """Say goodbye to a worker that listens; websockets would wait without end for one that does not read."""
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await socket.close()
    finally:  # also where the gateway stops just then
        socket.transport.abort()


def _decode(data: bytes | str) -> Up:
    if isinstance(data, str):
        raise ProtocolFault("a text message")
    try:
        return decode_up(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolFault(f"a message that does not decode: {error}") from error
