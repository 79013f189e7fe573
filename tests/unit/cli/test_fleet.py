"""`antiphon fleet`: what a person and a program read of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from antiphon.cli.fleet import listed
from antiphon.cli.main import main
from antiphon.core.lease import Lease, LeaseFault
from antiphon.kv.leases import Found
from support.leasing import lease, leases_at
from support.loopback import SECRET
from support.redisserver import RedisServer, redis_server


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """One server on loopback."""
    with redis_server() as running:
        yield running


@pytest.fixture
def options(server: RedisServer, tmp_path: Path) -> list[str]:
    """Where the leases are, and the secret."""
    file = tmp_path / "secret"
    file.write_text(SECRET.replace(" ", "-"))
    return ["fleet", "--control-redis", server.url, "--secret-file", str(file)]


def _write(url: str, *leases_of: Lease, secret: str = SECRET.replace(" ", "-")) -> None:
    async def write() -> None:
        async with leases_at(url, secret) as leases:
            for one in leases_of:
                await leases.renew(one)

    asyncio.run(write())


def test_table_has_a_line_for_each_worker(
    server: RedisServer, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By model and name, and what each says of itself; a forged lease is named and not shown."""
    _write(
        server.url,
        lease("http://10.0.0.8:8100", worker="b", num_blocks=8),
        lease("http://10.0.0.7:8100", worker="a", draining=True),
    )
    forged = lease("http://evil:1", worker="c")
    _write(server.url, forged, secret="the secret of somebody else")
    assert main(options) == 0
    head, first, second, last = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["name", "address", "model", "namespace"]
    assert first.split()[:6] == ["a", "http://10.0.0.7:8100", "scripted", "ns", "both", "draining"]
    assert second.split()[:6] == ["b", "http://10.0.0.8:8100", "scripted", "ns", "both", "ready"]
    assert last == f"worker {forged.id}: its lease does not count: forged"


def test_program_reads_json(
    server: RedisServer, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """All fields, seconds since the last renewal among them."""
    mine = lease("http://10.0.0.7:8100")
    _write(server.url, mine)
    assert main([*options, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    (worker,) = said["workers"]
    assert worker["id"] == mine.id
    assert worker["is_linked"] is None
    assert 0 <= worker["age_s"] < 6
    assert said["refused"] == {}


def test_nobody_is_exit_code_1(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A script can wait for the first worker."""
    assert main(options) == 1
    assert capsys.readouterr().out == "no worker has a lease\n"


def test_redis_that_does_not_answer_is_one_line(
    server: RedisServer, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With its address, exit code 1."""
    server.kill()
    try:
        assert main(options) == 1
    finally:
        server.start()
    err = capsys.readouterr().err
    assert f"127.0.0.1:{server.port}" in err
    assert err.count("\n") == 1


def test_nothing_to_look_at_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No option, no variable, no run here: exit code 2."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("ANTIPHON_CONTROL_REDIS_URL", raising=False)
    assert main(["fleet"]) == 2
    assert "--control-redis URL" in capsys.readouterr().err
    assert main(["fleet", "--control-redis", "redis://127.0.0.1:1"]) == 2
    assert "--secret-file" in capsys.readouterr().err


def test_links_of_the_gateway_are_shown_beside() -> None:
    """Who has a lease and no link is seen at once; what is refused is not among the workers."""
    one, two = lease("http://h:1", worker="one"), lease("http://h:2", worker="two")
    found = {
        one.id: Found(one, 0.5),
        two.id: Found(two, 0.5),
        "x": Found(LeaseFault.TOO_LONG, 0.1),
        "gone": None,
    }
    listing = listed(found, {"ws://h:1/link": True, "ws://h:3/link": True})
    assert [(member.name, member.is_linked) for member in listing.workers] == [("one", True), ("two", False)]
    assert listing.refused == {"x": "too_long"}
