"""What the doctor says about a control Redis."""

from __future__ import annotations

import dataclasses
import json

import pytest

from antiphon.cli.checks import Finding
from antiphon.cli.controlchecks import check_control, check_facts
from antiphon.cli.main import main
from antiphon.kv.admin import ServerFacts
from support.redisserver import redis_server

GOOD = ServerFacts(
    address="control:6379",
    version="7.2.4",
    role="master",
    max_memory_bytes=64 * 2**20,
    used_memory_bytes=2**20,
    policy="noeviction",
    num_keys=7,
    num_evicted=0,
    is_append_only=False,
    save="",
    io_threads=1,
)


def _amiss(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != "ok"]


def test_server_that_keeps_what_it_is_given_is_fine() -> None:
    """A real one, with a login that may do everything."""
    with redis_server("--maxmemory-policy", "noeviction") as server:
        findings = list(check_control(server.url))
        with server.client() as client:
            assert client.dbsize() == 0
    assert _amiss(findings) == []
    assert all(finding.subject == "control redis" for finding in findings)


@pytest.mark.parametrize(
    ("change", "level", "words", "advice"),
    [
        ({"policy": "volatile-ttl"}, "warn", "workers vanish", "noeviction"),
        ({"role": "slave"}, "fail", "replica", "master"),
        ({"version": "6.0.16"}, "warn", "6.0.16", "6.2 or newer"),
    ],
)
def test_what_is_amiss_is_said_with_what_to_do(
    change: dict[str, object], level: str, words: str, advice: str
) -> None:
    """The server of KV blocks, named twice, is what most people get wrong."""
    (amiss,) = _amiss(list(check_facts(dataclasses.replace(GOOD, **change))))
    assert amiss.level == level
    assert words in amiss.text
    assert advice in amiss.advice


def test_server_that_hides_its_settings_is_not_blamed() -> None:
    """An open question is no fault."""
    assert _amiss(list(check_facts(dataclasses.replace(GOOD, policy=None)))) == []


def test_login_that_may_not_do_all_is_told_which() -> None:
    """Each refused command, with the rights to give."""
    user = ("--user", "some", "on", ">right", "~antiphon:*", "-@all", "+set", "+getrange", "+ping")
    with redis_server(*user) as server:
        findings = _amiss(list(check_control(server.url.replace("://", "://some:right@"))))
    refused = {finding.text.split()[0] for finding in findings if finding.level == "fail"}
    of_leases = {"PTTL", "DEL", "SADD", "PEXPIRE", "SRANDMEMBER", "SREM"}
    assert refused == of_leases | {"HSET", "HINCRBY", "HSETNX", "HGETALL", "HDEL", "TIME"}
    assert all("ACL SETUSER" in finding.advice for finding in findings)


def test_server_that_is_not_there_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """The doctor's exit code says so, and its line names the place without the password."""
    arguments = ["doctor", "--model", "scripted", "--port", "0", "--redis", "none", "--json"]
    assert main([*arguments, "--control-redis", "redis://:hush@127.0.0.1:1"]) == 1
    out = capsys.readouterr().out
    (finding,) = [one for one in json.loads(out) if one["subject"] == "control redis"]
    assert "127.0.0.1:1 cannot be used" in finding["text"]
    assert "hush" not in out


def test_none_and_auto_are_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is fine; auto looks for a server to start."""
    assert [finding.level for finding in check_control("none")] == ["ok"]
    monkeypatch.setenv("PATH", "/nowhere")
    (finding,) = check_control("auto")
    assert finding.level == "warn"
    assert "install" in finding.advice
