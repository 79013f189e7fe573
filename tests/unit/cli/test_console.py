"""What `antiphon serve` shows."""

from __future__ import annotations

import io
import json
import sys

import pytest

from antiphon.cli.console import Console
from antiphon.cli.events import Progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_ready_line_is_all_of_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """A script that reads stdout sees exactly one line; the rest is on stderr."""
    console = Console(as_json=False)
    console.progress("worker-1", Progress("loading", 0.5))
    console.note("a note")
    console.ready("http://127.0.0.1:8000", "smollm2", 1)
    shown = capsys.readouterr()
    assert (
        shown.out
        == "Antiphon is ready at http://127.0.0.1:8000 (model smollm2, 1 worker). Ctrl-C stops it.\n"
    )
    assert shown.err == "worker-1: loading\na note\n"


def test_ready_line_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """--json makes the line an object."""
    Console(as_json=True).ready("http://127.0.0.1:8000", "smollm2", 2)
    assert json.loads(capsys.readouterr().out) == {
        "event": "ready",
        "url": "http://127.0.0.1:8000",
        "model": "smollm2",
        "workers": 2,
    }


def test_each_step_is_one_line_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    """Where stderr is no terminal, progress within a step says nothing new."""
    console = Console(as_json=False)
    for fraction in (0.1, 0.2, 0.3):
        console.progress("worker-1", Progress("loading", fraction))
    console.progress("worker-2", Progress("loading", 0.1))
    assert capsys.readouterr().err == "worker-1: loading\nworker-2: loading\n"


def test_progress_is_one_changing_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal a line replaces the one before, fits the width and goes when there is more to say."""
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "20")
    console = Console(as_json=False)
    console.progress("w", Progress("x" * 100, 0.5))
    console.note("done")
    clear = "\r\x1b[K"
    assert terminal.getvalue() == f"{clear}w: {'x' * 11}  50%\r{clear}done\n"
