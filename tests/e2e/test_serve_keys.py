"""`antiphon serve`, `antiphon keys` and `antiphon chat` together, as an operator and a caller use them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import openai
import pytest
from openai import OpenAI
from tests.support.served import PATIENCE_S, serving

ANTIPHON = (sys.executable, "-m", "antiphon.cli.main")
OPEN = ("--model", "scripted", "--port", "0", "--host", "0.0.0.0")


def _run(*arguments: str, state: Path, told: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    environ: Mapping[str, str] = {"XDG_STATE_HOME": str(state), "PATH": "/usr/bin:/bin", **more}
    command = [*ANTIPHON, *arguments]
    return subprocess.run(
        command, env=environ, input=told, capture_output=True, text=True, timeout=PATIENCE_S
    )


def test_first_key_opens_the_door(tmp_path: Path) -> None:
    """Beyond loopback: refused without keys, with the way out; with one it serves who has it."""
    refused = _run("serve", *OPEN, state=tmp_path)
    assert refused.returncode == 2
    assert "antiphon keys create" in refused.stderr
    key = _run("keys", "create", "--tenant", "acme", state=tmp_path).stdout.strip()
    with serving(*OPEN, XDG_STATE_HOME=str(tmp_path)) as served:
        with OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0) as client:
            said = client.chat.completions.create(
                model="scripted", messages=[{"role": "user", "content": "Hello"}]
            )
            assert said.choices[0].message.content == "Hello"
        with (
            OpenAI(base_url=f"{served.url}/v1", api_key="anything", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
        with_key = _run("chat", "--url", served.url, state=tmp_path, told="Hello", ANTIPHON_API_KEY=key)
        assert (with_key.returncode, with_key.stdout) == (0, "Hello\n")
        without = _run("chat", "--url", served.url, state=tmp_path, told="Hello")
        assert without.returncode == 2
        assert "ANTIPHON_API_KEY" in without.stderr
        assert served.stop() == 0
    (listed,) = json.loads(_run("keys", "list", "--json", state=tmp_path).stdout)
    assert listed["last_used_at"] is not None


def test_scope_secret_outlives_a_run(tmp_path: Path) -> None:
    """It is made at the first start, for this user alone, and kept: else nothing stored is found again."""
    file = tmp_path / "antiphon" / "scope-secret"
    secrets = []
    for _ in range(2):
        with serving("--model", "scripted", "--port", "0", XDG_STATE_HOME=str(tmp_path)) as served:
            assert served.stop() == 0
        secrets.append(file.read_text())
        assert file.stat().st_mode & 0o777 == 0o600
    assert secrets[0] == secrets[1]


def test_bad_prefix_file_stops_the_start(tmp_path: Path) -> None:
    """Before a model is loaded, with the file's name."""
    file = tmp_path / "public.toml"
    file.write_text("[[prefixes]]\n")
    done = _run("serve", "--model", "scripted", "--public-prefix-file", str(file), state=tmp_path)
    assert done.returncode == 2
    assert "public.toml" in done.stderr
    assert done.stderr.count("\n") == 1
