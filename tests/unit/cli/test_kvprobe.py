"""`antiphon kv probe` over pages of a worker and a real store."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from antiphon.cli.kvchain import Chain, Prompt
from antiphon.cli.main import main
from antiphon.cli.state import standing_secret, state_folder
from antiphon.core.scope import ScopeMaker
from antiphon.worker.kvinfo import KvHeld
from support.kvpages import SECRET, make_info, worker_pages
from support.kvvalues import NAMESPACE
from support.redisserver import redis_server

TEXT = "Once upon a time there was a cache."  # 35 tokens of the scripted model's bytes
INFO = make_info(namespace=NAMESPACE, block_tokens=4)


@pytest.fixture
def secret_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file with the workers' secret, in a state folder of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("ANTIPHON_REDIS_URL", raising=False)
    file = tmp_path / "secret"
    file.write_text(SECRET)
    return str(file)


def _chain(tmp_path: Path) -> Chain:
    """Of TEXT, as a request without a key has it."""
    state = state_folder({"XDG_STATE_HOME": str(tmp_path)})
    maker = ScopeMaker(standing_secret(state / "scope-secret"))
    scope = maker.scope("local", cache_salt=None, prompt_cache_key=None)
    return Chain.of(INFO, Prompt(list(TEXT.encode())), scope)


def test_probe_finds_blocks_in_worker_and_store(
    secret_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first blocks are in the engine, the next in the store, and behind a hole nothing counts."""
    chain = _chain(tmp_path)
    assert len(chain.hashes) == 8
    held = KvHeld(engine=chain.hashes[:2], host=chain.hashes[1:3])
    with redis_server(unix=True) as server, worker_pages(INFO, held) as url:
        with server.client() as client:
            client.mset(dict.fromkeys([*chain.keys[2:5], chain.keys[6]], b"value"))
        arguments = ["--redis", server.url, "--worker", url, "--secret-file", secret_file]
        arguments += ["--model", "scripted", "--text", TEXT]
        assert main(["kv", "probe", *arguments]) == 0
        *lines, total = capsys.readouterr().out.splitlines()
        assert main(["kv", "probe", *arguments, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
    assert [line.split("  ")[-1] for line in lines] == [
        "engine@worker-1",
        "engine@worker-1, host@worker-1",
        "host@worker-1, redis",
        "redis",
        "redis",
        "-",
        "redis",
        "-",
    ]
    assert "35 tokens, 8 full blocks of 4" in total
    assert "first 5 blocks (20 tokens) need not be computed" in total
    assert report["num_tokens"] == 35
    assert [block["hash"] for block in report["blocks"]] == chain.hashes
    assert report["blocks"][3]["places"] == ["redis"]


def test_chat_comes_from_a_file_or_stdin(
    secret_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both ways lead to the same blocks."""
    body = b'[{"role":"user","content":"Hello"}]'
    (tmp_path / "chat.json").write_bytes(body)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(body)))
    reports = []
    with worker_pages(INFO) as url:
        for chat in (str(tmp_path / "chat.json"), "-"):
            arguments = ["--worker", url, "--secret-file", secret_file, "--model", "scripted"]
            assert main(["kv", "probe", *arguments, "--chat", chat, "--json"]) == 0
            reports.append(json.loads(capsys.readouterr().out))
    assert reports[0] == reports[1]
    assert reports[0]["blocks"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--text", "x", "--tenant", "acme"], "no tenant 'acme'"),
        (["--text", "x", "--model", "nothing"], "no model 'nothing'"),
        (["--chat", "/nowhere.json"], "--chat /nowhere.json: No such file"),
    ],
)
def test_what_cannot_be_probed_is_one_line(
    arguments: list[str], words: str, secret_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and the reason."""
    with worker_pages(INFO) as url:
        given = ["--worker", url, "--secret-file", secret_file, "--model", "scripted", *arguments]
        assert main(["kv", "probe", *given]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_namespace_is_needed_and_must_be_one(secret_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody but a worker knows it, and two of them give two chains."""
    probe = ["kv", "probe", "--secret-file", secret_file, "--model", "scripted", "--text", TEXT]
    assert main([*probe, "--worker", "http://127.0.0.1:1"]) == 2
    assert "no worker answers" in capsys.readouterr().err
    with worker_pages(INFO) as one, worker_pages(make_info("worker-2", b"namespc2")) as two:
        assert main([*probe, "--worker", one, "--worker", two]) == 2
    assert "several namespaces" in capsys.readouterr().err


def test_prompt_must_be_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Text or chat, not both and not neither."""
    for arguments in ([], ["--text", "x", "--chat", "-"]):
        with pytest.raises(SystemExit) as end:
            main(["kv", "probe", *arguments])
        assert end.value.code == 2
