"""Log lines for machines and for people."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from antiphon.obs.log import configure_logging


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restored_root() -> Iterator[None]:
    """The root logger as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level


def test_a_line_is_json_where_nobody_watches() -> None:
    """One object a line, with level, time and the fields given."""
    out = io.StringIO()
    configure_logging(stream=out).bind(worker="w").info("link.up", model="m", note="two\nlines")
    (line,) = out.getvalue().splitlines()
    fields = json.loads(line)
    assert (fields["event"], fields["level"], fields["worker"], fields["model"]) == (
        "link.up",
        "info",
        "w",
        "m",
    )
    assert fields["note"] == "two\nlines"
    assert fields["timestamp"].endswith("Z")


def test_a_line_is_for_people_on_a_terminal() -> None:
    """No JSON, and tracebacks as Python prints them."""
    out = Terminal()
    log = configure_logging(stream=out)
    log.info("link.up", model="m")
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("request.fault")
    assert "link.up" in out.getvalue()
    assert not out.getvalue().startswith("{")
    assert "ValueError: broken" in out.getvalue()


def test_a_traceback_stays_in_its_line() -> None:
    """As a field of the JSON."""
    out = io.StringIO()
    log = configure_logging(stream=out)
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("request.fault")
    (line,) = out.getvalue().splitlines()
    assert "ValueError: broken" in json.loads(line)["exception"]


def test_levels() -> None:
    """What is below the level is not written; an unknown level is refused by name."""
    out = io.StringIO()
    log = configure_logging(level="warning", stream=out)
    log.info("quiet")
    log.warning("loud")
    assert [json.loads(line)["event"] for line in out.getvalue().splitlines()] == ["loud"]
    with pytest.raises(ValueError, match="loudest"):
        configure_logging(level="loudest", stream=out)


def test_libraries_speak_in_the_same_form() -> None:
    """From warnings on, with their arguments filled in."""
    out = io.StringIO()
    configure_logging(stream=out)
    logging.getLogger("uvicorn.error").info("hidden")
    logging.getLogger("uvicorn.error").warning("shown %s", 5)
    (line,) = out.getvalue().splitlines()
    fields = json.loads(line)
    assert (fields["event"], fields["level"]) == ("shown 5", "warning")
