"""Workers that are found by their leases: real processes, a real control Redis, killed and paused."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import msgspec
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests.support.served import PATIENCE_S, serving

from antiphon.cli import leash
from antiphon.cli.runfolder import living_runs
from antiphon.core.lease import Lease
from antiphon.kv import redisurl
from support.redisserver import RedisServer, find_redis, redis_server

COMMAND = (sys.executable, "-m", "antiphon.cli.main")
WELL_WITHIN_S = 5.0  # a gateway that was started again routes


@dataclass
class Started:
    """A process of ours that listens."""

    process: subprocess.Popen[str]
    url: str

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE_S) == 0


class Fleet:
    """Starts processes that share a secret and a control Redis."""

    def __init__(self, folder: Path, control: str) -> None:
        self._folder = folder
        self._control = control
        self._all: list[Started] = []
        self._numbers = itertools.count()
        self.secret = folder / "fleet-secret"
        self.secret.write_text("0123456789abcdef\n")

    def worker(self, name: str, *options: str) -> Started:
        return self._start("worker", "--name", name, "--port", "0", *options)

    def gateway(self, *options: str, port: int = 0) -> Started:
        return self._start("gateway", "--port", str(port), *options)

    def end(self) -> None:
        for started in self._all:
            started.process.kill()
            started.process.communicate()

    def _start(self, command: str, *options: str) -> Started:
        common = ("--model", "scripted", "--secret-file", str(self.secret), "--log-level", "error")
        number = next(self._numbers)
        with (self._folder / f"errors-{number}").open("w") as errors:
            process = subprocess.Popen(
                [*COMMAND, command, *common, "--control-redis", self._control, *options],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"XDG_STATE_HOME": str(self._folder), "ANTIPHON_REDIS_URL": "none"},
            )
        started = Started(process, "")
        self._all.append(started)
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready, (self._folder / f"errors-{number}").read_text()
        started.url = ready.split()[-1]
        return started


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A control Redis."""
    with redis_server("--maxmemory-policy", "noeviction") as running:
        yield running


@contextmanager
def fleet_in(folder: Path, control: str) -> Iterator[Fleet]:
    """A fleet whose processes are gone after the block."""
    made = Fleet(folder, control)
    try:
        yield made
    finally:
        made.end()


def until(is_so: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    """Wait for it."""
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ask(gateway: Started | str, text: str = "Hello", model: str = "scripted") -> httpx2.Response:
    url = gateway if isinstance(gateway, str) else gateway.url
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    return httpx2.post(f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=PATIENCE_S)


def answers(gateway: Started | str) -> bool:
    return ask(gateway).status_code == 200


def num_up(gateway: Started | str) -> int:
    """Links of this gateway that are up."""
    url = gateway if isinstance(gateway, str) else gateway.url
    page = httpx2.get(f"{url}/metrics", trust_env=False, timeout=PATIENCE_S).text
    return len(re.findall(r"^antiphon_worker_up\{.*\} 1\.0$", page, re.MULTILINE))


def test_two_gateways_over_two_workers(tmp_path: Path, server: RedisServer) -> None:
    """Both find both and route; both see a drain; one that is killed is back well within 5 s."""
    with fleet_in(tmp_path, server.url) as fleet, ThreadPoolExecutor(8) as pool:
        starts = [
            pool.submit(fleet.worker, "one"),
            pool.submit(fleet.worker, "two"),
            pool.submit(fleet.gateway),
            pool.submit(fleet.gateway),
        ]
        one, two, here, there = [start.result() for start in starts]
        until(lambda: num_up(here) == num_up(there) == 2)
        replies = list(pool.map(ask, [here, there] * 8))
        assert [reply.status_code for reply in replies] == 16 * [200]
        one.stop()
        assert all(answers(gateway) for gateway in (here, there))  # at once: the drain was told over links
        until(lambda: num_up(here) == num_up(there) == 1)
        port = int(here.url.rpartition(":")[2])
        here.kill()
        assert answers(there)
        again = fleet.gateway(port=port)
        until(lambda: answers(again), within_s=WELL_WITHIN_S)
        two.stop()
        assert ask(again).status_code == ask(there).status_code == 503


def test_gateway_with_nothing_but_a_redis_that_is_down(tmp_path: Path, server: RedisServer) -> None:
    """It starts, says 503 with Retry-After, and serves once Redis is back; a static list needs no Redis."""
    with fleet_in(tmp_path, server.url) as fleet, ThreadPoolExecutor(4) as pool:
        server.kill()
        started = pool.submit(fleet.worker, "one"), pool.submit(fleet.gateway)
        worker, gateway = (start.result() for start in started)
        refusal = ask(gateway)
        assert refusal.status_code == 503
        assert int(refusal.headers["retry-after"]) > 0
        static = fleet.gateway("--worker", worker.url)
        until(lambda: answers(static), within_s=WELL_WITHIN_S)
        server.start()
        until(lambda: answers(gateway))
        server.pause()
        try:
            assert all(answers(gateway) for _ in range(5))
            static.kill()
            again = fleet.gateway("--worker", worker.url)
            until(lambda: answers(again), within_s=WELL_WITHIN_S)
        finally:
            server.resume()


def test_one_gateway_for_several_models(tmp_path: Path, server: RedisServer) -> None:
    """Each request goes to a worker of its model; one that nobody serves now is a 503, an unknown one 404."""
    catalogue = tmp_path / "models.toml"
    catalogue.write_text('[[model]]\nname="other"\nengine="scripted"\nscript="noise"\ncontext=512\n')
    options = ("--catalogue", str(catalogue), "--model", "other")
    with fleet_in(tmp_path, server.url) as fleet, ThreadPoolExecutor(4) as pool:
        starts = [
            pool.submit(fleet.worker, "one"),
            pool.submit(fleet.worker, "two", *options),
            pool.submit(fleet.gateway, *options),
            pool.submit(fleet.gateway),
        ]
        _, two, both, alone = [start.result() for start in starts]
        until(lambda: num_up(both) == 2 and num_up(alone) == 1)
        assert ask(both).json()["choices"][0]["message"]["content"] == "Hello"
        assert ask(both, model="other").json()["choices"][0]["message"]["content"] != "Hello"
        assert ask(alone, model="other").status_code == 404
        two.stop()
        assert ask(both, model="other").status_code == 503
        assert answers(both)


def test_stopped_worker_leaves_and_comes_back(tmp_path: Path, server: RedisServer) -> None:
    """SIGSTOP: its lease runs out by itself; SIGCONT: it is there again, under the same id."""
    with fleet_in(tmp_path, server.url) as fleet:
        worker = fleet.worker("one")

        def listed() -> list[str]:
            place = ("--control-redis", server.url, "--secret-file", str(fleet.secret))
            done = subprocess.run(
                [*COMMAND, "fleet", "--json", *place],
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
            )
            return [member["id"] for member in json.loads(done.stdout)["workers"]]

        with server.client() as client:
            until(lambda: bool(client.keys("antiphon:control:worker:*")))
            (before,) = listed()
            worker.process.send_signal(signal.SIGSTOP)
            until(lambda: not client.keys("antiphon:control:worker:*"))
            assert listed() == []
            worker.process.send_signal(signal.SIGCONT)
            until(lambda: bool(client.keys("antiphon:control:worker:*")))
            assert listed() == [before]
            worker.stop()
            assert client.dbsize() == 0


def test_drain_is_told_before_it_ends(tmp_path: Path, server: RedisServer) -> None:
    """SIGTERM in the middle of an answer: the lease says so until the last token, then there is none."""
    catalogue = tmp_path / "models.toml"
    catalogue.write_text('[[model]]\nname="scripted"\nengine="scripted"\ncontext=512\nstep_s=0.02\n')
    options = ("--catalogue", str(catalogue))
    text = "All of this must arrive, slowly but surely. "
    with fleet_in(tmp_path, server.url) as fleet, ThreadPoolExecutor(1) as pool:
        worker, gateway = fleet.worker("one", *options), fleet.gateway(*options)
        until(lambda: num_up(gateway) == 1)
        answer = pool.submit(ask, gateway, text)
        with server.client() as client:

            def is_draining() -> bool:
                (key,) = client.keys("antiphon:control:worker:*")
                value = client.get(key)
                assert isinstance(value, bytes)
                return msgspec.json.decode(value.split(b" ", 2)[2], type=Lease).load.draining

            until(lambda: _running(worker) > 0)
            assert not is_draining()
            worker.process.send_signal(signal.SIGTERM)
            until(is_draining)
            assert answer.result().json()["choices"][0]["message"]["content"] == text
            assert worker.process.wait(PATIENCE_S) == 0
            assert client.keys("antiphon:control:worker*") == []


def _running(worker: Started) -> float:
    page = httpx2.get(f"{worker.url}/metrics", trust_env=False, timeout=PATIENCE_S).text
    return sum(map(float, re.findall(r"^antiphon_num_requests_running (\S+)$", page, re.MULTILINE)))


@pytest.mark.skipif(not leash.IS_SUPPORTED, reason="a Redis of our own is started on Linux only")
def test_worker_joins_a_running_serve(tmp_path: Path) -> None:
    """Started by hand with its secret and its control Redis; `antiphon fleet` shows both; it may leave."""
    find_redis()
    options = ("--model", "scripted", "--port", "0", "--control-redis", "auto")
    with serving(*options, ANTIPHON_CONTROL_REDIS_URL="") as served:
        state = Path(served.process_environ("XDG_STATE_HOME"))
        (card,) = living_runs(state / "antiphon")
        assert card.control is not None
        with fleet_in(tmp_path, card.control) as fleet:
            fleet.secret.write_text(Path(card.secret_file).read_text())
            joined = fleet.worker("by-hand")
            until(lambda: num_up(served.url) == 2)
            shown = subprocess.run(
                [*COMMAND, "fleet"],
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                env=os.environ | {"XDG_STATE_HOME": str(state), "ANTIPHON_CONTROL_REDIS_URL": ""},
            )
            assert shown.returncode == 0
            assert [line.split()[0] for line in shown.stdout.splitlines()] == ["name", "by-hand", "worker-1"]
            assert shown.stdout.count(" ready ") == 2
            served.child("worker-1").kill()
            assert answers(served.url)  # by the other one
            until(lambda: num_up(served.url) == 2)
            joined.stop()
            until(lambda: num_up(served.url) == 1)
            assert answers(served.url)
        assert served.stop() == 0


@pytest.mark.skipif(not leash.IS_SUPPORTED, reason="a Redis of our own is started on Linux only")
def test_killed_control_redis_of_serve_comes_back(tmp_path: Path) -> None:
    """kill -9: nobody notices but the log; an empty one starts at its place and has the lease in a beat."""
    find_redis()
    options = ("--model", "scripted", "--port", "0", "--control-redis", "auto")
    with serving(*options, ANTIPHON_CONTROL_REDIS_URL="") as served:
        (card,) = living_runs(Path(served.process_environ("XDG_STATE_HOME")) / "antiphon")
        assert card.control is not None
        url = redisurl.parse(card.control).addresses[0].host

        def pid_and_size() -> tuple[int, int] | None:
            try:
                with redis.Redis(unix_socket_path=url, retry=Retry(NoBackoff(), 0)) as client:
                    leases = client.keys("antiphon:control:worker*")
                    return int(client.info("server")["process_id"]), len(leases)
            except redis.RedisError:
                return None

        until(lambda: (pid_and_size() or (0, 0))[1] == 2)
        before = pid_and_size()
        assert before is not None
        os.kill(before[0], signal.SIGKILL)
        assert all(answers(served.url) for _ in range(5))
        until(lambda: (now := pid_and_size()) is not None and now[0] != before[0] and now[1] == 2)
        assert answers(served.url)
        family = served.children()
        assert len(family) == 3
        assert served.stop() == 0
        assert not any(process.is_running() for process in family)
