"""What the doctor says about a store."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from antiphon.cli.checks import Finding, worst
from antiphon.cli.main import main
from antiphon.cli.redischecks import check_rights, check_server, check_speed, check_store
from antiphon.kv.admin import Right, ServerFacts, Speed
from support.redisserver import redis_server

GOOD = ServerFacts(
    address="cache:6379",
    version="7.2.4",
    role="master",
    max_memory_bytes=4 * 2**30,
    used_memory_bytes=2**30,
    policy="volatile-ttl",
    num_keys=7,
    num_evicted=0,
    is_append_only=False,
    save="",
    io_threads=1,
)
AS_A_CACHE = ("--maxmemory", "64mb", "--maxmemory-policy", "volatile-ttl")


def _levels(findings: list[Finding]) -> set[str]:
    return {finding.level for finding in findings}


def test_cache_is_fine() -> None:
    """A server that is set up as we want it gets no advice."""
    findings = list(check_server(GOOD, is_lone=True))
    assert _levels(findings) == {"ok"}
    assert all(finding.subject == "redis" and not finding.advice for finding in findings)
    assert findings[0].text == "cache:6379: version 7.2.4, 7 keys, 1024 MiB used"


def test_servers_of_a_cluster_are_told_apart() -> None:
    """Where there are several, each line says which it is about."""
    assert all("cache:6379" in finding.text for finding in check_server(GOOD, is_lone=False))


@pytest.mark.parametrize(
    ("change", "level", "words", "advice"),
    [
        ({"version": "6.2.14"}, "warn", "6.2.14", "7.0 or newer"),
        ({"role": "slave"}, "fail", "replica", "master"),
        ({"max_memory_bytes": 0}, "warn", "no limit", "CONFIG SET maxmemory 4gb"),
        ({"policy": "noeviction"}, "warn", "refuses writes when it is full", "volatile-ttl"),
        ({"policy": "allkeys-lru"}, "warn", "allkeys-lru", "volatile-ttl"),
        ({"save": "3600 1"}, "warn", "writes snapshots", 'CONFIG SET save ""'),
        ({"is_append_only": True}, "warn", "writes an append-only file", "appendonly no"),
        ({"is_append_only": True, "save": "1 1"}, "warn", "append-only file and snapshots", "appendonly no"),
    ],
)
def test_what_is_amiss_is_said_with_what_to_do(
    change: dict[str, object], level: str, words: str, advice: str
) -> None:
    """Each setting that hurts a cache is one finding with the command to type."""
    findings = list(check_server(dataclasses.replace(GOOD, **change), is_lone=True))
    (amiss,) = [finding for finding in findings if finding.level != "ok"]
    assert amiss.level == level
    assert words in amiss.text
    assert advice in amiss.advice


def test_server_that_says_little_is_not_blamed() -> None:
    """Managed servers hide their settings: an open question is no fault."""
    silent = dataclasses.replace(
        GOOD, max_memory_bytes=None, used_memory_bytes=None, policy=None, is_append_only=None, save=None
    )
    findings = list(check_server(silent, is_lone=True))
    assert _levels(findings) == {"ok"}
    assert sum("does not say" in finding.text for finding in findings) == 3


def test_refused_commands_are_named_with_who_needs_them() -> None:
    """A worker cannot do without; the operator's commands can."""
    rights = [
        Right("SET", "worker", "NOPERM no"),
        Right("SCAN", "antiphon kv", "NOPERM no"),
        Right("GET", "worker", None),
    ]
    findings = list(check_rights(rights))
    assert [finding.level for finding in findings] == ["fail", "warn"]
    assert "SET is refused, which worker needs: NOPERM no" in findings[0].text
    assert all("ACL SETUSER" in finding.advice for finding in findings)
    assert _levels(list(check_rights(rights[2:]))) == {"ok"}


@pytest.mark.parametrize(
    ("speed", "level"),
    [(Speed(1e-4, 1e9, 2e9), "ok"), (Speed(2e-2, 1e9, 2e9), "warn"), (Speed(1e-4, 1e9, 2e7), "warn")],
)
def test_slow_store_is_no_failure(speed: Speed, level: str) -> None:
    """Figures are shown; a slow one is a warning that says what it means."""
    finding = check_speed(speed)
    assert finding.level == level
    assert "MB/s" in finding.text
    assert bool(finding.advice) == (level == "warn")


def test_real_cache_passes() -> None:
    """Against a real server that is set up as a cache every finding is ok, and no key is left."""
    with redis_server(*AS_A_CACHE, unix=True) as server:
        findings = list(check_store(server.url))
        with server.client() as client:
            assert client.dbsize() == 0
    assert [finding for finding in findings if finding.level == "fail"] == []
    assert [f.text for f in findings if f.level == "warn" and f.subject != "redis speed"] == []
    assert {"redis rights", "redis speed"} < {finding.subject for finding in findings}


def test_real_defaults_get_advice() -> None:
    """A server as it comes from the package is told what it lacks as a cache."""
    with redis_server("--save", "3600 1") as server:
        findings = list(check_store(server.url))
    texts = " ".join(finding.text for finding in findings if finding.level == "warn")
    assert "no limit" in texts
    assert "noeviction" in texts
    assert "snapshots" in texts


def test_login_with_too_few_rights_fails(tmp_path: Path) -> None:
    """The doctor tries what workers do, with the login they would use."""
    acl = tmp_path / "users.acl"
    acl.write_text(
        "user default off\nuser reader on >password ~antiphon:kv:* -@all +get +ping +info +scan +strlen\n"
    )
    with redis_server(*AS_A_CACHE, "--aclfile", str(acl)) as server:
        url = server.url.replace("redis://", "redis://reader:password@")
        findings = list(check_store(url))
    refused = [finding.text.split()[0] for finding in findings if finding.level == "fail"]
    assert refused == ["SET", "PEXPIRE", "UNLINK"]
    assert not [finding for finding in findings if finding.subject == "redis speed"]


def test_rights_that_the_advice_gives_are_enough(tmp_path: Path) -> None:
    """Who types what the doctor says is not sent back for more."""
    (refusal,) = check_rights([Right("SET", "worker", "NOPERM")])
    rules = [word for word in refusal.advice.split() if word.startswith(("+", "-", "~"))]
    acl = tmp_path / "users.acl"
    acl.write_text(f"user default off\nuser us on >password {' '.join(rules)}\n")
    with redis_server(*AS_A_CACHE, "--aclfile", str(acl)) as server:
        url = server.url.replace("redis://", "redis://us:password@")
        findings = list(check_store(url))
    assert [finding for finding in findings if finding.level == "fail"] == []
    assert not [finding for finding in findings if finding.subject == "redis rights" and finding.advice]


@pytest.mark.parametrize("user", ["", "somebody:wrong@"])
def test_wrong_login_is_told_from_an_absent_server(user: str, tmp_path: Path) -> None:
    """Without a login, or with a wrong one: the advice is where to put it; the password is not shown."""
    with redis_server("--requirepass", "password") as server:
        (finding,) = check_store(server.url.replace("redis://", f"redis://{user}"))
    assert finding.level == "fail"
    assert "USER:PASSWORD" in finding.advice
    assert "wrong" not in finding.text.partition("WRONGPASS")[0]


def test_absent_server_fails() -> None:
    """Nobody listens there."""
    (finding,) = check_store("redis://127.0.0.1:1")
    assert finding.level == "fail"
    assert "127.0.0.1:1 cannot be used: unreachable" in finding.text


def test_unreadable_certificates_fail() -> None:
    """What the URL says of TLS must be there."""
    (finding,) = check_store("rediss://127.0.0.1:1?ca=/nowhere.pem")
    assert finding.level == "fail"
    assert "certificates" in finding.text


def test_no_store_and_one_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`none` is fine; `auto` says which server will be started, or how to get one."""
    assert worst(list(check_store("none"))) == "ok"
    server = tmp_path / "redis-server"
    server.write_text("#!/bin/sh\necho 'Redis server v=7.0.15 '\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = check_store("auto")
    assert (found.level, str(server) in found.text) == ("ok", True)
    server.unlink()
    (missing,) = check_store("auto")
    assert missing.level == "warn"
    assert "apt-get install redis-server" in missing.advice


def test_doctor_takes_the_store_from_option_or_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both ways lead to the same findings, and a store that cannot be used fails the whole report."""
    doctor = ["doctor", "--model", "scripted", "--port", "0", "--json"]
    assert main([*doctor, "--redis", "redis://127.0.0.1:1"]) == 1
    by_option = json.loads(capsys.readouterr().out)
    monkeypatch.setenv("ANTIPHON_REDIS_URL", "redis://127.0.0.1:1")
    assert main(doctor) == 1
    assert json.loads(capsys.readouterr().out)[-1] == by_option[-1]
    assert main([*doctor, "--redis", "none"]) == 0
