"""Events between `antiphon serve` and its processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.cli.events import Progress, Ready, read, tell


@pytest.mark.parametrize("event", [Progress("loading", 0.5), Progress("looking"), Ready(8100)])
def test_what_is_told_is_read(event: Progress | Ready, capsys: pytest.CaptureFixture[str]) -> None:
    """An event is one line, and the line is the event."""
    tell(event)
    out = capsys.readouterr().out
    assert out.endswith("\n")
    assert out.count("\n") == 1
    assert read(out.encode()) == event


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"loading...\n", b'{"event":"ready"}', b'{"event":"x"}', b"[]", b"\xff"]
)
def test_other_lines_are_no_events(line: bytes) -> None:
    """Text of libraries, half events and unknown ones are None."""
    assert read(line) is None


@given(st.binary(max_size=200))
def test_no_line_is_an_error(line: bytes) -> None:
    """Whatever a process prints, its reader lives."""
    assert read(line) is None or isinstance(read(line), Progress | Ready)


def test_newlines_in_a_text_stay_in_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A text cannot forge a second event."""
    tell(Progress('x\n{"event":"ready","port":1}'))
    assert capsys.readouterr().out.count("\n") == 1
