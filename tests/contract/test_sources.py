"""The seam between what computes and what writes: workers, upstreams by ids, upstreams by messages.

One suite over all: the same pieces, the same ends, the same silence after an end, whoever answers.
Each runs over real sockets against a far side whose script a test decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest

from antiphon.core.clock import WallClock
from antiphon.core.errors import AntiphonError
from antiphon.core.generation import Generation, Sampling, StepOutput, Terminal
from antiphon.gateway.account import Account
from antiphon.gateway.course import Source, lacks_capacity
from antiphon.gateway.models import RelayedModel, ServedModel
from antiphon.gateway.parse import parse_chat
from antiphon.gateway.text import TextStream, whole_of
from antiphon.gateway.upstreamtext import UpstreamText
from antiphon.obs.metrics import GatewayMetrics
from antiphon.router.backends import Backend, Workers
from antiphon.router.upstream import Upstream
from antiphon.router.upstreamdialects import Dialect, LlamaServer, Vllm
from antiphon.router.upstreamids import IdsUpstream
from antiphon.tokens.textmodel import load_text_model
from support.dispatchers import dispatcher
from support.gateways import MODEL
from support.lines import Lines
from support.loopback import LoopbackWorker, Session, saying
from support.upstreams import DONE, Part, Reply, UpstreamServer, data, delta, usage

SAYS, HANGS, CUTS = "says", "hangs", "cuts"  # after its text


@dataclass
class Rig:
    """A far side, and how to ask it."""

    make: Callable[[int], Source]  # with so many choices
    told: asyncio.Queue[object]  # filled where the far side hears that its answer was ended


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return ServedModel(load_text_model(MODEL))


def _generation(n: int) -> Generation:
    sampling = Sampling(seed=1, max_tokens=64)
    return Generation(id="g", model="scripted", sampling=sampling, token_ids=[1], num_prompt_tokens=1, n=n)


def _vllm(text: str) -> list[bytes]:
    events = [data({"choices": [{"text": "", "token_ids": [byte]}]}) for byte in text.encode()]
    return [*events, data({"choices": [{"text": "", "token_ids": [], "finish_reason": "stop"}]}), DONE]


def _llama(text: str) -> list[bytes]:
    ids = enumerate(text.encode(), start=1)
    events = [data({"content": "", "tokens": [byte], "tokens_predicted": number}) for number, byte in ids]
    return [*events, data({"stop": True, "stop_type": "eos", "tokens_predicted": len(text)})]


def _messages(text: str) -> list[bytes]:
    return [*map(delta, text), delta(finish="stop"), usage(), DONE]


UPSTREAMS = {"vllm-ids": _vllm, "llama-server-ids": _llama, "messages": _messages}
EVERYBODY = ["worker", *UPSTREAMS]


@contextlib.asynccontextmanager
async def rig(kind: str, served: ServedModel, text: str, then: str) -> AsyncIterator[Rig]:
    """Sources whose far side says `text`, and then ends, hangs or is gone."""
    if kind == "worker":
        async with _worker_rig(served, text, then) as made:
            yield made
        return
    parts: list[Part] = list(UPSTREAMS[kind](text))
    if then != SAYS:
        del parts[len(text) :]  # an event a character, then the end
    if then == HANGS:
        parts.append(asyncio.Event())
    server = UpstreamServer(Reply(parts, is_cut=then == CUTS))
    async with server.running():
        metrics = GatewayMetrics()
        entry = server.entry("scripted")
        upstream = Upstream(entry, None, metrics.upstreams, WallClock(), Lines().logger())
        try:
            make = _maker(kind, served, upstream)
            yield Rig(make, server.left)
        finally:
            await upstream.close()


def _maker(kind: str, served: ServedModel, upstream: Upstream) -> Callable[[int], Source]:
    if kind == "messages":
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}

        def relay(n: int) -> Source:
            request = parse_chat(json.dumps(body | {"n": n}).encode())
            model = RelayedModel(MODEL, upstream)
            return UpstreamText(model, b"{}", request, Account("POST", None))

        return relay
    dialect: Dialect = Vllm() if kind == "vllm-ids" else LlamaServer(lambda text: list(text.encode()))
    return _generator(IdsUpstream(upstream, dialect, 4096), served)


def _generator(backend: Backend, served: ServedModel) -> Callable[[int], Source]:
    def generate(n: int) -> Source:
        answers = [backend.start(_generation(n))]
        return TextStream(answers, served, (), Account("POST", None), Lines().logger())

    return generate


@contextlib.asynccontextmanager
async def _worker_rig(served: ServedModel, text: str, then: str) -> AsyncIterator[Rig]:
    async def script(session: Session, generation: Generation) -> None:
        if then == SAYS:
            await saying(text)(session, generation)
            return
        for choice in generation.choices:
            for at, byte in enumerate(text.encode()):
                await session.send(StepOutput(generation.id, choice, at, [byte]))
        if then == CUTS:
            ends = [StepOutput(generation.id, c, len(text), [], Terminal.ERROR) for c in generation.choices]
            await session.send(*ends)

    worker = LoopbackWorker(script)
    async with dispatcher(worker) as made:
        yield Rig(_generator(Workers(made), served), worker.aborts)


@pytest.mark.parametrize("kind", EVERYBODY)
async def test_text_and_one_end(kind: str, served: ServedModel) -> None:
    """Pieces joined are the text; the last one alone has the reason; the print is known by then."""
    async with rig(kind, served, "hello", SAYS) as made:
        source = made.make(1)
        pieces = [piece async for batch in source.batches(60) for piece in batch]
    assert "".join(piece.text for piece in pieces) == "hello"
    assert [piece.finish for piece in pieces] == [None] * (len(pieces) - 1) + [Terminal.STOP]
    assert source.fingerprint.startswith("fp_")


@pytest.mark.parametrize("kind", ["worker", "vllm-ids", "llama-server-ids"])
async def test_choices(kind: str, served: ServedModel) -> None:
    """Each has its text and its end."""
    async with rig(kind, served, "hi", SAYS) as made:
        whole = await whole_of(made.make(3).batches(60))
    assert [(piece.choice, piece.text, piece.finish) for piece in whole] == [
        (choice, "hi", Terminal.STOP) for choice in range(3)
    ]


@pytest.mark.parametrize("kind", EVERYBODY)
@pytest.mark.parametrize("text", ["", "he"])
async def test_ended_from_here(kind: str, served: ServedModel, text: str) -> None:
    """Before and after the first word: the reader gets an error, the far side is told at once."""
    async with rig(kind, served, text, HANGS) as made, asyncio.timeout(10):
        source = made.make(1)
        said = ""
        with pytest.raises(AntiphonError) as caught:
            async for batch in source.batches(0.2):
                said += "".join(piece.text for piece in batch)
                if said == text:
                    source.end(Terminal.DEADLINE)
                    source.end(Terminal.ABORTED)
        assert caught.value.code == "deadline_exceeded"
        assert said == text
        await made.told.get()


@pytest.mark.parametrize("kind", EVERYBODY)
async def test_silence_is_told(kind: str, served: ServedModel) -> None:
    """An empty batch after each while without a word."""
    async with rig(kind, served, "", HANGS) as made, asyncio.timeout(10):
        source = made.make(1)
        batches = source.batches(0.01)
        assert [await anext(batches) for _ in range(3)] == [[], [], []]
        source.end(Terminal.ABORTED)
        with pytest.raises(AntiphonError):
            await anext(batches)


@pytest.mark.parametrize("kind", EVERYBODY)
@pytest.mark.parametrize("text", ["", "he"])
async def test_a_far_side_that_fails(kind: str, served: ServedModel, text: str) -> None:
    """Nothing but what came is handed out, then the error; it is one that another model might not have."""
    async with rig(kind, served, text, CUTS) as made, asyncio.timeout(10):
        said = ""
        with pytest.raises(AntiphonError) as caught:
            async for batch in made.make(1).batches(60):
                said += "".join(piece.text for piece in batch)
                assert all(piece.finish is None for piece in batch)
        assert text.startswith(said)
        assert lacks_capacity(caught.value)


@pytest.mark.parametrize("kind", EVERYBODY)
async def test_ended_while_nobody_reads(kind: str, served: ServedModel) -> None:
    """The far side is told at once, though the reader is busy with its client."""
    async with rig(kind, served, "he", HANGS) as made, asyncio.timeout(10):
        source = made.make(1)
        batches = source.batches(60)
        assert await anext(batches)
        source.end(Terminal.ABORTED)
        await made.told.get()
        with pytest.raises(AntiphonError):
            while True:  # what had come, then the error
                await anext(batches)
