"""The doctor's report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from antiphon.cli.main import main


def test_report_has_a_line_for_each_question(capsys: pytest.CaptureFixture[str]) -> None:
    """A person reads level, subject and what is so."""
    assert main(["doctor", "--model", "scripted", "--port", "0"]) == 0
    out = capsys.readouterr().out
    for subject in ("antiphon", "python", "llama.cpp", "cores", "model", "port"):
        assert any(line.split()[1] == subject for line in out.splitlines() if not line.startswith(" "))


def test_report_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """A program reads a list of findings."""
    assert main(["doctor", "--model", "scripted", "--port", "0", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {"level", "subject", "text", "advice"} == set(findings[0])
    assert {f["level"] for f in findings} <= {"ok", "warn"}


def test_failure_is_exit_code_1_and_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broken model file makes the report a failure with advice."""
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF")
    assert main(["doctor", "--model", str(file), "--port", "0"]) == 1
    out = capsys.readouterr().out
    assert "fail  model" in out
    assert "→ Name another with --model" in out
