"""`antiphon serve` with the Redis it starts: real processes, killed and counted."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from antiphon.cli import leash
from antiphon.cli.runfolder import living_runs
from support.kvserve import card_of, redis_of, until
from support.redisserver import find_redis, redis_server
from support.served import PATIENCE_S, SERVE, Served, serving, state_of_its_own

pytestmark = pytest.mark.skipif(not leash.IS_SUPPORTED, reason="a Redis of our own is started on Linux only")

SCRIPTED = ("--model", "scripted", "--port", "0")


@pytest.fixture(autouse=True)
def needs_redis() -> None:
    """Each of these needs a server to start."""
    find_redis()


def client_of(served: Served) -> redis.Redis:
    """A connection to that Redis."""
    url = card_of(served).redis
    assert url is not None
    return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), socket_timeout=PATIENCE_S)


def answers(served: Served) -> bool:
    """Whether the run's Redis can be used."""
    try:
        with client_of(served) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


def has_ended(process: psutil.Process) -> bool:
    """Nobody may be there to bury it where its parent died first."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_redis_is_started_for_the_workers_and_stopped_with_them() -> None:
    """Workers are handed its URL outside their command lines; after SIGTERM nothing is left."""
    with serving(*SCRIPTED, "--workers", "2", "--redis", "auto") as served:
        server = redis_of(served)
        assert answers(served)
        card = card_of(served)
        assert len(card.workers) == 2
        for name in ("worker-1", "worker-2"):
            worker = served.child(name)
            assert worker.environ()["ANTIPHON_REDIS_URL"] == card.redis
            assert "kv.sock" not in " ".join(worker.cmdline())
            assert "--kv-key-file" in worker.cmdline()
        family = served.children()
        assert served.stop() == 0
        assert psutil.wait_procs(family, PATIENCE_S)[1] == []
        assert not server.is_running()
        assert not Path(card.secret_file).parent.exists()


def test_killed_redis_comes_back_under_its_url() -> None:
    """kill -9: a new, empty server at the same socket, and the workers were left alone."""
    with serving(*SCRIPTED, "--redis", "auto") as served:
        server, worker, url = redis_of(served), served.child("worker"), card_of(served).redis
        server.kill()
        psutil.wait_procs([server], PATIENCE_S)
        until(lambda: answers(served), "Redis stays away")
        assert redis_of(served).pid != server.pid
        assert card_of(served).redis == url
        assert served.child("worker").pid == worker.pid
        assert served.stop() == 0


def test_death_of_serve_leaves_no_redis() -> None:
    """Even SIGKILL of `antiphon serve` takes its Redis with it."""
    with serving(*SCRIPTED, "--redis", "auto") as served:
        server = redis_of(served)
        served.process.kill()
        served.process.wait()
        until(lambda: has_ended(server), "Redis lives on")


def test_two_runs_have_a_redis_each() -> None:
    """Side by side, also with one state folder: what one stores the other does not see."""
    with (
        serving(*SCRIPTED, "--redis", "auto") as one,
        serving(*SCRIPTED, "--redis", "auto", XDG_STATE_HOME=one.process_environ("XDG_STATE_HOME")) as two,
    ):
        assert redis_of(one).pid != redis_of(two).pid
        state = Path(one.process_environ("XDG_STATE_HOME")) / "antiphon"
        cards = living_runs(state)
        assert len({card.redis for card in cards}) == 2
        assert len({card.secret_file for card in cards}) == 2
        one.stop()
        assert [card.gateway for card in living_runs(state)] == [two.url]
        assert two.stop() == 0


@pytest.mark.parametrize("choice", ["none", None])
def test_no_redis_is_started_where_none_is_wanted(choice: str | None) -> None:
    """The option and the environment can both say `none`."""
    options = () if choice is None else ("--redis", choice)
    with serving(*SCRIPTED, *options) as served:
        assert len(served.children()) == 2
        assert card_of(served).redis is None
        assert served.child("worker").environ()["ANTIPHON_REDIS_URL"] == "none"
        assert served.stop() == 0


def test_redis_of_the_operator_is_used_and_left_alone() -> None:
    """With a URL nothing is started, and what was there stays."""
    with redis_server() as server, serving(*SCRIPTED, ANTIPHON_REDIS_URL=server.url) as served:
        assert len(served.children()) == 2
        assert card_of(served).redis == server.url
        assert served.child("worker").environ()["ANTIPHON_REDIS_URL"] == server.url
        assert server.url not in " ".join(served.child("worker").cmdline())
        assert served.stop() == 0
        with server.client() as client:
            assert client.ping()


_DIES = 'case "$1" in --version) echo "Redis server v=7.9.9";; *) echo "no memory"; exit 3; esac'


@pytest.mark.parametrize(
    ("script", "words"),
    [(None, "apt-get install redis-server"), ("exit 1", "does not run"), (_DIES, "redis: no memory")],
)
def test_serve_works_without_a_redis_that_starts(script: str | None, words: str, tmp_path: Path) -> None:
    """No binary, a broken one, one that dies at once: a line says so, and the run becomes ready."""
    if script is not None:
        (tmp_path / "redis-server").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "redis-server").chmod(0o755)
    with state_of_its_own() as environ:
        process = subprocess.Popen(
            [*SERVE, *SCRIPTED, "--redis", "auto", "--log-level", "error"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ | {"PATH": str(tmp_path)},
        )
        try:
            assert process.stdout is not None
            assert "is ready at" in process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
            process.communicate()
    assert process.returncode == 0
    assert "KV is shared within a worker only" in err
    assert words in err
