"""What the doctor says about the database."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from antiphon.cli.databasechecks import check_database, check_facts
from antiphon.cli.main import main
from antiphon.store.database import Facts, file_url


def test_file_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """The doctor looks; the first start makes it."""
    (finding,) = check_database(file_url(tmp_path / "keys.db"))
    assert finding.level == "ok"
    assert "made at the first start" in finding.text
    assert list(tmp_path.iterdir()) == []


def test_database_in_use_is_fine(database_url: str) -> None:
    """Its version, its round trip and its schema; the URL without its password."""
    main(["keys", "create", "--database", database_url])
    findings = list(check_database(database_url))
    assert {finding.level for finding in findings} == {"ok"}
    text = " ".join(finding.text for finding in findings)
    assert "round trip" in text
    assert "schema 0" in text
    assert "p%40ss" not in text


def test_empty_database_is_left_empty(database_url: str) -> None:
    """Looking twice finds no tables: the doctor makes none, and writes nothing into a file."""
    file = Path(database_url.removeprefix("sqlite:///"))
    is_file = file.is_absolute()
    if is_file:
        file.touch()
    for _ in range(2):
        text = " ".join(finding.text for finding in check_database(database_url))
        assert "tables are made at the first start" in text
    assert not is_file or file.read_bytes() == b""


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        (Facts("PostgreSQL", "15", "0001", False, 0.05), "warn", "slow"),
        (Facts("PostgreSQL", "15", "9999", True, 0.001), "fail", "newer Antiphon"),
    ],
)
def test_what_is_amiss(facts: Facts, level: str, words: str) -> None:
    """Said once, with what to do."""
    (amiss,) = [finding for finding in check_facts("postgresql://h/d", facts) if finding.level != "ok"]
    assert amiss.level == level
    assert words in amiss.text
    assert amiss.advice


def test_database_that_is_not_there_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """The doctor's exit code says so, and its line names the place without the password."""
    arguments = ["doctor", "--model", "scripted", "--port", "0", "--redis", "none", "--control-redis", "none"]
    assert main([*arguments, "--json", "--database", "postgresql://me:hush@127.0.0.1:1/keys"]) == 1
    out = capsys.readouterr().out
    (finding,) = [one for one in json.loads(out) if one["subject"] == "database"]
    assert "postgresql://me:***@127.0.0.1:1/keys cannot be used" in finding["text"]
    assert "hush" not in out


def test_certificates_that_cannot_be_read_are_a_failure(tmp_path: Path) -> None:
    """Said as a finding, like everything that is wrong with the place."""
    (finding,) = check_database(f"postgresql://me@h/d?sslrootcert={tmp_path / 'none'}")
    assert finding.level == "fail"
    assert "certificates" in finding.text
