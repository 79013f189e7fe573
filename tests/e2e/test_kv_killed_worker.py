"""A worker that dies by SIGKILL while it writes its blocks: what is in Redis then is whole and of use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from bench.faultproxy import FaultProxy, Faults

from antiphon.cli import leash
from antiphon.kv import mackeys
from antiphon.kv.codec import Header, verify
from antiphon.kv.keys import parse_block_key
from support.kvserve import cached, chat, infos_of, until
from support.redisserver import RedisServer, redis_server
from support.served import PATIENCE_S, serving, state_of_its_own

pytestmark = pytest.mark.skipif(not leash.IS_SUPPORTED, reason="a served run is looked into on Linux only")

MODELS = [
    pytest.param("scripted", 100e3, id="scripted"),
    pytest.param("smollm2", 20e6, id="smollm2", marks=pytest.mark.model),
]
SAID = " ".join(f"Rule {number}: answer shortly and be kind to number {number}." for number in range(60))
MESSAGES = [{"role": "system", "content": SAID}, {"role": "user", "content": "Who are you?"}]
FEW = 5  # blocks; so many are stored when the worker is killed, or a few more


def headers_in(redis: RedisServer, environ: Mapping[str, str]) -> list[Header]:
    """The headers of all blocks in Redis, each value proven under the key it lies at, fronts first."""
    keys = mackeys.load(Path(environ["XDG_STATE_HOME"]) / "antiphon" / "kv-mac-keys")
    headers = []
    with redis.client() as client:
        for name in client.keys("antiphon:kv:*"):
            key = parse_block_key(name.decode())
            assert key is not None
            headers.append(verify(key, client.get(name), keys))
    return sorted(headers, key=lambda header: header.first_position)


def num_in(redis: RedisServer) -> int:
    """Blocks in Redis."""
    with redis.client() as client:
        return int(client.dbsize())


@pytest.mark.parametrize(("model", "bytes_per_s"), MODELS)
def test_what_a_killed_writer_left_is_a_front_and_is_used(model: str, bytes_per_s: float) -> None:
    """Redis is reached so slowly that kill -9 comes between, and within, values of one chain.

    The first answer was computed with an empty Redis, so it is the answer without one.
    """
    options = ("--model", model, "--port", "0", "--kv-host-mib", "0")
    with redis_server() as redis, state_of_its_own() as environ:
        with FaultProxy.to_port(redis.port) as proxy:
            proxy.faults = Faults(request_bytes_per_s=bytes_per_s)
            with serving(*options, **environ | {"ANTIPHON_REDIS_URL": proxy.url}) as served:
                first = chat(served, MESSAGES, model=model)
                (info,) = infos_of(served)
                num_blocks = first["usage"]["prompt_tokens"] // info.block_tokens
                until(lambda: num_in(redis) >= FEW, "nothing is written")
                worker = served.child("worker")
                worker.kill()
                proxy.cut()  # what the kernel would still have sent for it
                psutil.wait_procs([worker], PATIENCE_S)
                served.stop()
        front = headers_in(redis, environ)
        assert FEW <= len(front) < num_blocks, "it was not killed in the middle"
        assert [header.first_position for header in front] == [
            index * info.block_tokens for index in range(len(front))
        ]
        with serving(*options, **environ | {"ANTIPHON_REDIS_URL": redis.url}) as served:
            second = chat(served, MESSAGES, model=model)
            assert second["choices"] == first["choices"]
            assert cached(first) == 0
            assert cached(second) == len(front) * info.block_tokens
            until(lambda: num_in(redis) >= num_blocks, "the rest of the chain is not written")
            assert headers_in(redis, environ)[: len(front)] == front
