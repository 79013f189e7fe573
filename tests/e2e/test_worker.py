"""A whole worker on loopback, spoken to over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx2
import msgspec
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from antiphon.core.catalogue import ModelEntry
from antiphon.core.errors import EngineFault
from antiphon.core.generation import Generation, Load, StepOutput, Terminal, WorkerRates
from antiphon.core.kvblock import Tier
from antiphon.core.wire import Abort, Blocks, Forget, Frame, Hello, Resync, Submit, decode_up, encoder
from antiphon.obs.log import configure_logging
from antiphon.worker.build import EngineSize
from antiphon.worker.main import WorkerSettings, run_worker

Make = Callable[..., Generation]
SECRET = "a secret of this test"


@dataclass
class Running:
    """A worker that serves in this process."""

    port: int
    task: asyncio.Task[None]

    def connect(self, secret: str = SECRET) -> connect:
        headers = {"Authorization": f"Bearer {secret}"}
        return connect(
            f"ws://127.0.0.1:{self.port}/link", additional_headers=headers, compression=None, proxy=None
        )

    async def get(self, path: str) -> httpx2.Response:
        async with httpx2.AsyncClient(trust_env=False) as client:
            return await client.get(f"http://127.0.0.1:{self.port}{path}")


@contextlib.asynccontextmanager
async def worker(tmp_path: Path, *, drain_s: float = 5.0, **entry: object) -> AsyncIterator[Running]:
    """Run a scripted worker until the block ends; what it raises is kept for the test to look at."""
    settings = WorkerSettings(
        entry=ModelEntry(name="scripted", engine="scripted", **{"script": "babble", "context": 512} | entry),
        secret=SECRET,
        weights_folder=tmp_path,
        size=EngineSize(max_sequences=4),
        drain_s=drain_s,
    )
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    log = configure_logging(level="error")
    task = asyncio.create_task(run_worker(settings, ready.set_result, lambda text, fraction: None, log))
    await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
    try:
        yield Running(await ready, task)
    finally:
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
        with contextlib.suppress(EngineFault):
            await asyncio.wait_for(task, 10)


async def hello(socket: ClientConnection) -> Hello:
    message = decode_up(await socket.recv())
    assert isinstance(message, Hello)
    return message


async def next_frame(socket: ClientConnection) -> Frame:
    """The next frame; news of blocks come between them."""
    while isinstance(message := decode_up(await socket.recv()), Blocks):
        pass
    assert isinstance(message, Frame)
    return message


async def outputs(socket: ClientConnection, names: set[str]) -> dict[str, list[StepOutput]]:
    """Read frames until each of these generations (n=1) has ended."""
    found: dict[str, list[StepOutput]] = {name: [] for name in names}
    open_names = set(names)
    async with asyncio.timeout(10):
        while open_names:
            frame = await next_frame(socket)
            for output in frame.outputs:
                found[output.generation].append(output)
                if output.finish is not None:
                    open_names.discard(output.generation)
    return found


async def until(socket: ClientConnection, is_met: Callable[[Load], bool]) -> Load:
    """The load of the next frame of which this is true."""
    async with asyncio.timeout(10):
        while not is_met(load := (await next_frame(socket)).load):
            pass
    return load


def submit(generation: Generation) -> bytes:
    return encoder.encode(Submit(generation))


async def test_a_generation_comes_back_token_by_token(tmp_path: Path, make_generation: Make) -> None:
    """Hello first, then gapless outputs and one end."""
    async with worker(tmp_path) as running, running.connect() as socket:
        info = (await hello(socket)).info
        assert (info.model, info.context_tokens, info.max_sequences) == ("scripted", 512, 4)
        await socket.send(submit(make_generation("a", [1, 2, 3], max_tokens=20)))
        found = (await outputs(socket, {"a"}))["a"]
        assert [o.position for o in found] == list(range(20))
        assert found[-1].finish is Terminal.LENGTH


async def test_it_tells_how_fast_it_is(tmp_path: Path, make_generation: Make) -> None:
    """Idle and new it knows nothing but its room; after a prompt and some answer tokens both speeds."""
    async with worker(tmp_path, step_s=0.01) as running, running.connect() as socket:
        info = (await hello(socket)).info
        load = await until(socket, lambda load: True)
        assert (load.free_blocks, load.rates) == (info.num_blocks, WorkerRates())
        await socket.send(submit(make_generation("a", [1] * 40, max_tokens=5)))
        rates = (await until(socket, lambda load: load.rates.step_s > 0.0)).rates
        assert rates.step_s >= 0.01
        assert 0.0 < rates.prefill_tokens_per_s <= 40 / 0.01
        assert (rates.store_rtt_s, rates.store_blocks_per_s, rates.import_s_per_block) == (0.0, 0.0, 0.0)


async def test_two_gateways_get_their_own(tmp_path: Path, make_generation: Make) -> None:
    """Outputs go to the gateway that asked, and to no other."""
    async with worker(tmp_path) as running, running.connect() as one, running.connect() as two:
        await hello(one)
        await hello(two)
        await one.send(submit(make_generation("a", [1])))
        await two.send(submit(make_generation("b", [2])))
        assert set(await outputs(one, {"a"})) == {"a"}
        assert set(await outputs(two, {"b"})) == {"b"}


@pytest.mark.parametrize("secret", ["wrong", ""])
async def test_a_wrong_secret_is_refused_at_the_door(tmp_path: Path, secret: str) -> None:
    """No handshake, so no message of a stranger is ever decoded."""
    async with worker(tmp_path) as running:
        with pytest.raises(InvalidStatus):
            async with running.connect(secret):
                pass


@pytest.mark.parametrize(
    "message", [b"", b"\xc1", b"\x80\x04K\x01.", b'{"type":"submit"}', "text", encoder.encode(["submit"])]
)
async def test_a_malformed_message_ends_its_own_connection_only(
    tmp_path: Path, make_generation: Make, message: bytes | str
) -> None:
    """Nothing is guessed; the other gateway does not notice."""
    async with worker(tmp_path, step_s=0.002) as running, running.connect() as good, running.connect() as bad:
        await hello(good)
        await hello(bad)
        await good.send(submit(make_generation("a", [1], max_tokens=40)))
        await bad.send(message)
        with pytest.raises(ConnectionClosed):
            async with asyncio.timeout(5):
                while True:
                    await bad.recv()
        assert (await outputs(good, {"a"}))["a"][-1].finish is Terminal.LENGTH


async def test_a_lost_gateway_takes_its_generations_with_it(tmp_path: Path, make_generation: Make) -> None:
    """What nobody waits for is aborted: blocks and queue are free again."""
    async with worker(tmp_path, step_s=0.005) as running, running.connect() as watcher:
        await hello(watcher)
        async with running.connect() as socket:
            await hello(socket)
            for i in range(6):
                await socket.send(submit(make_generation(f"g{i}", [i], max_tokens=400)))
            await until(watcher, lambda load: load.running > 0)
            socket.transport.abort()  # no goodbye: what is unread would hold that up
        load = await until(watcher, lambda load: load.running == load.waiting == 0)
        assert load.used_blocks == 0


async def test_abort_of_a_stranger_does_nothing(tmp_path: Path, make_generation: Make) -> None:
    """A gateway can end its own generations only."""
    async with worker(tmp_path, step_s=0.002) as running, running.connect() as one, running.connect() as two:
        await hello(one)
        await hello(two)
        await one.send(submit(make_generation("a", [1], max_tokens=50)))
        await two.send(encoder.encode(Abort("a")))
        assert (await outputs(one, {"a"}))["a"][-1].finish is Terminal.LENGTH
        await one.send(submit(make_generation("b", [1], max_tokens=500)))
        await one.send(encoder.encode(Abort("b")))
        assert (await outputs(one, {"b"}))["b"][-1].finish is Terminal.ABORTED


async def test_refusals_carry_code_and_message(tmp_path: Path, make_generation: Make) -> None:
    """What the engine cannot run comes back as refused, and the id is free again."""
    async with worker(tmp_path) as running, running.connect() as socket:
        await hello(socket)
        await socket.send(submit(make_generation("a", list(range(200)) * 3)))
        refusal = (await outputs(socket, {"a"}))["a"][-1]
        assert refusal.finish is Terminal.REFUSED
        assert (refusal.error or "").startswith("context_length_exceeded: ")
        await socket.send(submit(make_generation("a", [1])))
        assert (await outputs(socket, {"a"}))["a"][-1].finish is Terminal.LENGTH


async def test_an_idle_worker_is_heard_of(tmp_path: Path) -> None:
    """Heartbeats come without any work."""
    async with worker(tmp_path) as running, running.connect() as socket:
        await hello(socket)
        async with asyncio.timeout(5):
            frames = [await next_frame(socket) for _ in range(2)]
        assert all(frame.outputs == [] for frame in frames)


async def test_gateways_are_told_which_blocks_are_held(tmp_path: Path, make_generation: Make) -> None:
    """All that is there when they come, what is computed later, and all anew when they ask for it."""
    async with worker(tmp_path) as running, running.connect() as one, asyncio.timeout(10):
        life = (await hello(one)).life
        assert life
        await one.send(submit(make_generation("a", list(range(100)), max_tokens=3)))
        held: set[bytes] = set()
        while len(held) < 3:
            blocks = await next_blocks(one)
            assert blocks.life == life
            held |= keys_of(blocks)
        async with running.connect() as two:
            assert (await hello(two)).life == life
            assert keys_of(snapshot := await next_blocks(two)) == held
            assert (snapshot.part, snapshot.is_last) == (0, True)
        await one.send(encoder.encode(Resync()))
        assert keys_of(again := await next_blocks(one)) == held
        assert (again.part, again.number) == (0, blocks.number)


async def test_an_erased_tenant_leaves_the_worker(tmp_path: Path, make_generation: Make) -> None:
    """Its blocks go, which gateways are told, and its next prompt is computed; another tenant's are there."""
    async with worker(tmp_path) as running, running.connect() as socket:
        assert (await hello(socket)).takes_forget
        scope = bytes(range(16))

        async def ask(name: str, scope: bytes) -> int:
            generation = make_generation(name, list(range(100)), max_tokens=1)
            generation = msgspec.structs.replace(generation, scope=scope + bytes(range(100, 116)))
            await socket.send(encoder.encode(Submit(generation)))
            while True:
                for output in (await next_frame(socket)).outputs:
                    if output.cached is not None:
                        return output.cached.total

        assert [await ask("a", scope), await ask("b", bytes(16))] == [0, 0]
        assert await ask("c", scope) > 0
        await socket.send(encoder.encode(Forget([scope])))
        while all(change.is_stored for change in (await next_blocks(socket)).changes):
            pass
        assert await ask("d", scope) == 0
        assert await ask("e", bytes(16)) > 0


async def next_blocks(socket: ClientConnection) -> Blocks:
    while not isinstance(message := decode_up(await socket.recv()), Blocks):
        pass
    return message


def keys_of(blocks: Blocks) -> set[bytes]:
    """What a message says is in the engine now."""
    assert all(change.is_stored and change.tier is Tier.ENGINE for change in blocks.changes)
    joined = b"".join(change.keys for change in blocks.changes)
    return {joined[at : at + 8] for at in range(0, len(joined), 8)}


async def test_sigterm_drains(tmp_path: Path, make_generation: Make) -> None:
    """Running answers are finished, new ones refused, then the process ends by itself."""
    async with worker(tmp_path, step_s=0.01) as running, running.connect() as socket:
        await hello(socket)
        await socket.send(submit(make_generation("old", [1], max_tokens=30)))
        await until(socket, lambda load: load.running > 0)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(socket, lambda load: load.draining)
        assert (await running.get("/healthz")).status_code == 503
        await socket.send(submit(make_generation("new", [2])))
        found = await outputs(socket, {"old", "new"})
        assert found["old"][-1].finish is Terminal.LENGTH
        assert found["new"][-1].finish is Terminal.REFUSED
        await asyncio.wait_for(running.task, 10)


async def test_what_is_not_done_within_the_drain_is_given_back(tmp_path: Path, make_generation: Make) -> None:
    """Its gateway hears which choices are lost, after all the tokens they had."""
    async with worker(tmp_path, drain_s=0.1, step_s=0.01) as running, running.connect() as socket:
        await hello(socket)
        await socket.send(submit(make_generation("long", [1], n=2, max_tokens=400)))
        await until(socket, lambda load: load.running == 2)
        os.kill(os.getpid(), signal.SIGTERM)
        found = (await outputs(socket, {"long"}))["long"]
        assert [o.finish for o in found if o.finish is not None] == [Terminal.LOST] * 2
        assert sum(len(o.ids) for o in found) < 800
        await asyncio.wait_for(running.task, 10)


async def test_a_dead_engine_is_seen_and_ends_the_process(tmp_path: Path, make_generation: Make) -> None:
    """Every open answer ends as lost, health turns bad, the process leaves with an error."""
    async with worker(tmp_path, die_after=5) as running, running.connect() as socket:
        await hello(socket)
        await socket.send(submit(make_generation("a", [1], max_tokens=50)))
        assert (await outputs(socket, {"a"}))["a"][-1].finish is Terminal.LOST
        assert (await running.get("/healthz")).status_code == 503
        with pytest.raises(EngineFault):
            await asyncio.wait_for(running.task, 10)


async def test_a_failed_step_leaves_the_worker_serving(tmp_path: Path, make_generation: Make) -> None:
    """The sequences of that step end in an error with a reason; the process and its health stay."""
    async with worker(tmp_path, fault_after=5) as running, running.connect() as socket:
        await hello(socket)
        await socket.send(submit(make_generation("a", [1], max_tokens=50)))
        last = (await outputs(socket, {"a"}))["a"][-1]
        assert (last.finish, last.error) == (Terminal.ERROR, "the scripted runner was told to fail")
        assert (await running.get("/healthz")).status_code == 200


async def test_metrics_count_what_was_computed(tmp_path: Path, make_generation: Make) -> None:
    """Prompt tokens computed and found, answer tokens, blocks."""
    async with worker(tmp_path) as running, running.connect() as socket:
        await hello(socket)
        for name in ("a", "b"):
            await socket.send(submit(make_generation(name, list(range(100)), max_tokens=3)))
            await outputs(socket, {name})
        text = (await running.get("/metrics")).text
        assert "antiphon_prefill_tokens_total 104.0" in text
        assert "antiphon_prefix_cache_hits_total 96.0" in text
        assert "antiphon_generation_tokens_total 6.0" in text
        assert (await running.get("/")).status_code == 404


async def test_another_path_is_no_link(tmp_path: Path) -> None:
    """Only /link speaks the protocol."""
    async with worker(tmp_path) as running:
        with pytest.raises(InvalidStatus):
            async with connect(f"ws://127.0.0.1:{running.port}/", proxy=None):
                pass
