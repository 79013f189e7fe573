"""One link to one worker, over a real socket: up, lost, hostile, back again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from antiphon.core.errors import BadRequest, NoReplica
from antiphon.core.generation import Generation, Load, Sampling, StepOutput, Terminal
from antiphon.core.kvblock import Tier
from antiphon.core.wire import PROTOCOL, BlockChange, Blocks, Frame, Hello, encoder
from antiphon.router import link as link_module
from antiphon.router.answer import Answer
from antiphon.router.attempt import Attempt
from antiphon.router.link import Failure, WorkerLink, link_url
from support.lines import Lines
from support.loopback import SECRET, LoopbackWorker, Script, Session, saying, silent, worker_info

IDLE = Load(0, 0, 0, 0, 0, 0, 0)


def make_answer(name: str = "g", n: int = 1, num_prompt_tokens: int = 2) -> Answer:
    generation = Generation(
        id=name,
        model="scripted",
        sampling=Sampling(seed=1, max_tokens=16),
        token_ids=[2**17] * num_prompt_tokens,
        num_prompt_tokens=num_prompt_tokens,
        n=n,
    )
    return Answer(generation)


class Linked:
    """A link that runs, and the answers it lost."""

    def __init__(self, url: str, secret: str = SECRET) -> None:
        self.lines = Lines()
        self.lost: list[Answer] = []
        self.failures: list[Failure] = []
        self.was_draining = False
        self.num_ups = self.num_downs = self.num_changes = 0
        self.blocks: asyncio.Queue[Blocks] = asyncio.Queue()
        self.link = WorkerLink(url, secret, self, self.lines.logger())

    def link_is_up(self, link: WorkerLink) -> None:
        self.num_ups += 1

    def load_changed(self, link: WorkerLink) -> None:
        self.num_changes += 1

    def link_is_down(self, link: WorkerLink, lost: Sequence[Attempt], *, was_draining: bool) -> None:
        self.num_downs += 1
        self.was_draining = was_draining
        for attempt in lost:
            self.lost.append(attempt.answer)
            attempt.answer.end(Terminal.LOST)

    def submit(self, answer: Answer) -> None:
        """Send a whole answer."""
        self.link.submit(Attempt(answer, answer.generation))

    def attempts_failed(self, link: WorkerLink, failures: Sequence[Failure]) -> None:
        self.failures += failures

    def on_blocks(self, link: WorkerLink, blocks: Blocks) -> None:
        self.blocks.put_nowait(blocks)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Linked]:
        task = asyncio.create_task(self.link.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])


@contextlib.asynccontextmanager
async def linked(worker: LoopbackWorker) -> AsyncIterator[Linked]:
    """A worker and a link to it that is up."""
    async with worker.running(), Linked(worker.url).running() as linked_:
        await linked_.lines.until("link.up")
        yield linked_


async def closed(answer: Answer) -> list[Terminal]:
    """Wait for the answer's end; how its choices ended, in order."""
    done = asyncio.Event()
    if answer.events.is_closed:
        done.set()
    answer.events.subscribe(lambda: done.set() if answer.events.is_closed else None)
    await asyncio.wait_for(done.wait(), 10)
    return [event.finish for event in answer.events.since(0) if event.finish is not None]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("http://h:1", "ws://h:1/link"),
        ("https://h:1/", "wss://h:1/link"),
        ("ws://h:1/link", "ws://h:1/link"),
        ("http://[::1]:1", "ws://[::1]:1/link"),
    ],
)
def test_addresses(given: str, meant: str) -> None:
    """A worker may be named by its HTTP address or by its WebSocket's."""
    assert link_url(given) == meant


@pytest.mark.parametrize("bad", ["", "h:1", "ftp://h:1", "http://", "http://h:1/other"])
def test_bad_addresses(bad: str) -> None:
    """What is not a worker's address is refused when the gateway starts, not when it connects."""
    with pytest.raises(BadRequest, match="http://HOST:PORT"):
        link_url(bad)


async def test_an_answer_comes_in() -> None:
    """A generation goes down whole, its tokens come up in order, the link forgets it at the end."""
    worker = LoopbackWorker(saying("hello"))
    async with linked(worker) as linked_:
        answer = make_answer()
        linked_.submit(answer)
        assert linked_.link.num_open_answers == 1
        assert await closed(answer) == [Terminal.STOP]
        assert bytes(answer.received[0].tolist()) == b"hello"
        assert await worker.submits.get() == answer.generation
        assert answer.worker == worker.info
        assert linked_.link.num_open_answers == 0


async def test_nothing_is_sent_before_the_worker_said_who_it_is() -> None:
    """A link that is down refuses work at once."""
    with pytest.raises(NoReplica):
        Linked("http://127.0.0.1:1").submit(make_answer())


async def test_load_since_the_report() -> None:
    """Work that was sent counts until the worker's next report; own work counts until it ends."""
    worker = LoopbackWorker(silent)
    worker.beats = False
    async with linked(worker) as linked_:
        answer = make_answer(n=3)
        linked_.submit(answer)
        assert linked_.link.state().dispatched == 3
        answer.abort()
        assert linked_.link.state().own == 0


async def test_abort_goes_down() -> None:
    """Of one choice while others go on, then of the whole generation."""
    worker = LoopbackWorker(silent)
    async with linked(worker) as linked_:
        answer = make_answer(n=2)
        linked_.submit(answer)
        answer.abort(1)
        answer.abort()
        messages = [await asyncio.wait_for(worker.aborts.get(), 10) for _ in range(2)]
        assert [(message.generation, message.choice) for message in messages] == [("g", 1), ("g", None)]
        assert await closed(answer) == [Terminal.ABORTED, Terminal.ABORTED]
        assert linked_.link.num_open_answers == 0


async def test_a_draining_worker_takes_no_work() -> None:
    """It stays connected for the answers it still makes."""

    async def drain(session: Session, generation: Generation) -> None:
        session.load = Load(0, 0, 0, 0, 0, 0, 0, draining=True)
        await session.send(StepOutput(generation.id, 0, 0, [], Terminal.STOP))

    async with linked(LoopbackWorker(drain)) as linked_:
        answer = make_answer()
        linked_.submit(answer)
        await closed(answer)
        assert linked_.link.is_up
        assert not linked_.link.takes_work
        with pytest.raises(NoReplica):
            linked_.submit(make_answer("h"))


async def test_a_wrong_secret_is_said_plainly() -> None:
    """The log names the refusal; the link stays down."""
    worker = LoopbackWorker(silent)
    async with worker.running(), Linked(worker.url, "wrong").running() as linked_:
        (line, *_) = await linked_.lines.until("link.refused")
        assert line["status"] == 403
        assert not linked_.link.is_up


async def test_another_protocol_is_refused() -> None:
    """A worker of another version is never spoken to."""
    worker = LoopbackWorker(silent)
    worker.protocol = PROTOCOL + 1
    async with worker.running(), Linked(worker.url).running() as linked_:
        (line, *_) = await linked_.lines.until("link.down")
        assert "protocol" in line["reason"]
        assert not linked_.link.is_up


def sends(make: Callable[[Generation], bytes | str]) -> Script:
    """A worker that answers the first generation with this message, and later ones well."""
    first = True

    async def script(session: Session, generation: Generation) -> None:
        nonlocal first
        if first:
            first = False
            await session.raw(make(generation))
        else:
            await saying("fine")(session, generation)

    return script


def frame(*outputs: StepOutput) -> bytes:
    return encoder.encode(Frame(list(outputs), IDLE))


HOSTILE: dict[str, Callable[[Generation], bytes | str]] = {
    "text": lambda g: "hello",
    "not msgpack": lambda g: b"\xc1\xc1\xc1",
    "empty": lambda g: b"",
    "truncated": lambda g: frame(StepOutput(g.id, 0, 0, [1]))[:-3],
    "deep nesting": lambda g: b"\x91" * 100_000,
    "unknown tag": lambda g: encoder.encode({"type": "exec", "code": "1"}),
    "second hello": lambda g: encoder.encode(Hello(PROTOCOL, worker_info())),
    "wrong types": lambda g: encoder.encode({"type": "frame", "outputs": [["g", "0", 0, []]], "load": IDLE}),
    "unknown finish": lambda g: encoder.encode(
        {"type": "frame", "outputs": [[g.id, 0, 0, [], "won"]], "load": IDLE}
    ),
    "unknown choice": lambda g: frame(StepOutput(g.id, 7, 0, [1])),
    "gap": lambda g: frame(StepOutput(g.id, 0, 5, [1])),
    "too many tokens": lambda g: frame(StepOutput(g.id, 0, 0, [1] * 1000)),
    "negative token": lambda g: frame(StepOutput(g.id, 0, 0, [-5])),
    "ext type": lambda g: b"\xc7\x03\x01abc",
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_worker_loses_its_link(name: str) -> None:
    """Its answers end as lost exactly once, nothing is guessed, and a fresh connection works."""
    async with linked(LoopbackWorker(sends(HOSTILE[name]))) as linked_:
        answer, bystander = make_answer("a"), make_answer("b", n=2)
        linked_.submit(bystander)
        linked_.submit(answer)
        assert await closed(answer) == [Terminal.LOST]
        assert len(await closed(bystander)) == 2
        await linked_.lines.until("link.up", 2)
        again = make_answer("c")
        linked_.submit(again)
        assert await closed(again) == [Terminal.STOP]


async def test_outputs_of_unknown_generations_are_ignored() -> None:
    """They may belong to an answer that ended here a moment ago."""

    async def script(session: Session, generation: Generation) -> None:
        await session.send(StepOutput("nobody's", 0, 17, [1]))
        await saying("hi")(session, generation)

    async with linked(LoopbackWorker(script)) as linked_:
        answer = make_answer()
        linked_.submit(answer)
        assert await closed(answer) == [Terminal.STOP]


async def test_silence_is_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is connected but says nothing is lost as if it had died."""
    monkeypatch.setattr(link_module, "LOST_AFTER_S", 0.1)
    worker = LoopbackWorker(silent)
    worker.beats = False
    async with linked(worker) as linked_:
        answer = make_answer()
        linked_.submit(answer)
        assert await closed(answer) == [Terminal.LOST]
        assert linked_.lost == [answer]


async def test_a_worker_that_stops_reading_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats alone do not keep a link up: what is sent down must be taken within its time."""
    monkeypatch.setattr(link_module, "SEND_TIMEOUT_S", 0.1)
    worker = LoopbackWorker(silent)
    worker.reads = False
    async with linked(worker) as linked_:
        answers = [make_answer(str(number), num_prompt_tokens=200_000) for number in range(40)]
        for answer in answers:  # more bytes than all buffers between the two
            linked_.submit(answer)
        assert [await closed(answer) for answer in answers] == [[Terminal.LOST]] * 40
        assert linked_.lost == answers


async def test_a_worker_that_comes_back_is_found() -> None:
    """On the same port, without anybody's help, also after several failed attempts."""
    worker = LoopbackWorker(saying("hello"))
    async with contextlib.AsyncExitStack() as stack:
        async with worker.running():
            linked_ = await stack.enter_async_context(Linked(worker.url).running())
            await linked_.lines.until("link.up")
            answer = make_answer()
            worker.script = silent
            linked_.submit(answer)
            await worker.submits.get()
        assert await closed(answer) == [Terminal.LOST]
        await linked_.lines.until("link.down", 3)
        assert not linked_.link.is_up
        worker.script = saying("again")
        async with worker.running():
            await linked_.lines.until("link.up", 2)
            answer = make_answer()
            linked_.submit(answer)
            assert await closed(answer) == [Terminal.STOP]


async def test_a_request_beyond_a_frame_is_refused() -> None:
    """It would cost the connection and everybody's answers."""
    async with linked(LoopbackWorker(silent)) as linked_:
        generation = Generation(
            id="g", model="scripted", sampling=Sampling(seed=1, max_tokens=1), messages=b"x" * (17 * 2**20)
        )
        with pytest.raises(BadRequest):
            linked_.submit(Answer(generation))
        assert linked_.link.num_open_answers == 0


async def test_an_outbox_that_is_not_emptied_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a worker is bounded; more work goes elsewhere."""
    monkeypatch.setattr(link_module, "MAX_OUTBOX", 2)
    async with linked(LoopbackWorker(silent)) as linked_:
        for number in range(2):  # no await: the writer cannot run in between
            linked_.submit(make_answer(str(number)))
        with pytest.raises(NoReplica):
            linked_.submit(make_answer("one too many"))


async def test_news_of_blocks_reach_the_listener_and_a_resync_the_worker() -> None:
    """In the order in which they were said; a worker says which life it lives when it says hello."""
    worker = LoopbackWorker(silent)
    worker.life = 77
    news = [
        Blocks(77, 0, [], part=0, is_last=True),
        Blocks(77, 1, [BlockChange(Tier.ENGINE, True, bytes(8))]),
    ]
    worker.first_words = news
    async with linked(worker) as linked_, asyncio.timeout(5):
        assert [await linked_.blocks.get(), await linked_.blocks.get()] == news
        assert linked_.link.life == 77
        linked_.link.resync()
        assert await worker.resyncs.get() in worker.sessions


async def test_a_worker_is_told_whom_to_forget() -> None:
    """One that takes it, while it is up; others are not sent what they would not understand."""
    tenants = [bytes(16), bytes(range(16))]
    worker = LoopbackWorker(silent)
    async with linked(worker) as linked_, asyncio.timeout(5):
        assert linked_.link.forget(tenants)
        assert await worker.forgets.get() == tenants
    assert not linked_.link.forget(tenants)
    old = LoopbackWorker(silent)
    old.takes_forget = False
    async with linked(old) as linked_, asyncio.timeout(5):
        assert not linked_.link.forget(tenants)
        linked_.link.resync()
        await old.resyncs.get()  # came behind it, had it been sent
        assert old.forgets.empty()


class Deaf:
    """A socket whose worker never says goodbye."""

    def __init__(self) -> None:
        self.transport = self
        self.is_aborted = False
        self.closing = asyncio.Event()

    async def close(self) -> None:
        self.closing.set()
        await asyncio.Event().wait()

    def abort(self) -> None:
        self.is_aborted = True


async def test_a_goodbye_that_is_cut_short_closes_the_socket() -> None:
    """A gateway that stops while it leaves a worker leaves no socket behind."""
    socket = Deaf()
    leaving = asyncio.create_task(link_module._hang_up(socket))  # type: ignore[arg-type]  # all it needs
    await socket.closing.wait()
    leaving.cancel()
    await asyncio.wait([leaving])
    assert leaving.cancelled()
    assert socket.is_aborted
