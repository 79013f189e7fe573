"""`antiphon kv rotate`: a fresh MAC key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from antiphon.cli.main import main
from antiphon.kv import mackeys


def test_key_before_is_still_believed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file holds both, and the line says which is which and what to do next."""
    file = tmp_path / "keys"
    before = mackeys.load_or_create(file)
    assert main(["kv", "rotate", "--kv-key-file", str(file)]) == 0
    after = mackeys.load(file)
    assert after.previous == before.current
    assert after.current != before.current
    out = capsys.readouterr().out
    assert f"key {after.current.id.hex()} signs now, {before.current.id.hex()} is still believed" in out
    assert "Restart the workers" in out


def test_file_in_the_state_folder_is_rotated_without_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same file that `serve` gives its workers."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["kv", "rotate", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(["kv", "rotate", "--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert second["previous"] == first["current"]
    (file,) = (tmp_path / "antiphon").glob("kv-mac-keys")
    assert mackeys.load(file).current.id.hex() == second["current"]


def test_damaged_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is made of a file that cannot be read."""
    file = tmp_path / "keys"
    file.write_text("nothing of ours")
    file.chmod(0o600)
    assert main(["kv", "rotate", "--kv-key-file", str(file)]) == 2
    err = capsys.readouterr().err
    assert "damaged" in err
    assert err.count("\n") == 1
    assert file.read_text() == "nothing of ours"
