"""Whole runs over every kind of Redis: what one run stored, the next one uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from support.kvserve import cached, chat, infos_of, num_stored, until
from support.redisserver import make_certificates, redis_cluster, redis_sentinel, redis_server
from support.served import serving, state_of_its_own

Between = Callable[[], None]


def nothing() -> None:
    """Most stores are left alone between the runs."""


@contextmanager
def over_tls() -> Iterator[tuple[str, Between]]:
    """One server, certificate checked."""
    with TemporaryDirectory() as folder, redis_server(tls=make_certificates(Path(folder))) as server:
        yield server.url, nothing


@contextmanager
def over_a_cluster() -> Iterator[tuple[str, Between]]:
    """Three masters."""
    with redis_cluster() as cluster:
        yield cluster.url, nothing


@contextmanager
def over_sentinel() -> Iterator[tuple[str, Between]]:
    """A watched master that dies between the runs."""
    with redis_sentinel() as watched:

        def fail_over() -> None:
            with watched.master.client() as client:
                assert client.wait(1, 10_000) == 1
            watched.fail_over()

        yield watched.url, fail_over


@pytest.mark.parametrize("deployment", [over_tls, over_a_cluster, over_sentinel])
def test_a_fresh_run_finds_what_another_stored(
    deployment: Callable[[], AbstractContextManager[tuple[str, Between]]],
) -> None:
    """One run answers and ends; the next one takes nearly all of the prompt from Redis."""
    said = [{"role": "user", "content": "These words fill a good many blocks of sixteen bytes each, I say."}]
    options = ("--model", "scripted", "--port", "0")
    with deployment() as (url, between), state_of_its_own() as environ:
        environ |= {"ANTIPHON_REDIS_URL": url}
        with serving(*options, **environ) as served:
            first = chat(served, said, model="scripted")
            assert cached(first) == 0
            until(lambda: num_stored(served) > 0, "nothing is written")
            assert served.stop() == 0
        between()
        with serving(*options, **environ) as served:
            second = chat(served, said, model="scripted")
            assert second["choices"][0]["message"] == first["choices"][0]["message"]
            num_prompt = second["usage"]["prompt_tokens"]
            assert num_prompt - cached(second) <= 32
            (info,) = infos_of(served)
            assert info.stats.num_store * info.block_tokens == cached(second)
