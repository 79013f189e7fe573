"""Finding and running commands."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest
from scripts.docs import actions_of

from antiphon import __version__
from antiphon.cli import main as main_module
from antiphon.cli.main import COMMANDS, load, main
from antiphon.core.errors import BadRequest, EngineFault

ANTIPHON = (sys.executable, "-m", "antiphon.cli.main")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`antiphon COMMAND --help` describes each option and shows a line to copy."""
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "example" in out
    assert f"  antiphon {name}" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_described(name: str) -> None:
    """No option goes without a word of what it does."""
    parser = load(name).parser()
    actions = [action for p in [parser, *actions_of(parser)] for action in p._actions]
    assert [action.dest for action in actions if not action.help] == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "which command?"),
        (["serv"], "did you mean 'serve'?"),
        (["xyzzy"], "there are serve, chat"),
        (["--serve"], "which command?"),
    ],
)
def test_no_or_unknown_command_is_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong first word ends with exit code 2 and a hint."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1


def test_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """The first page names every command."""
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """--version is the package's."""
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == f"antiphon {__version__}"


class _Command:
    """A command that does what a test says."""

    def __init__(self, ending: BaseException | int) -> None:
        self._ending = ending

    def parser(self) -> argparse.ArgumentParser:
        return argparse.ArgumentParser()

    def run(self, args: argparse.Namespace) -> int:
        if isinstance(self._ending, BaseException):
            raise self._ending
        return self._ending


@pytest.mark.parametrize(
    ("ending", "code", "err"),
    [
        (0, 0, ""),
        (1, 1, ""),
        (BadRequest("no such thing"), 2, "antiphon doctor: no such thing\n"),
        (EngineFault("it died"), 1, "antiphon doctor: it died\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_endings_become_exit_codes(
    ending: BaseException | int,
    code: int,
    err: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Errors of ours are one line; what the user asked wrongly is 2, what failed is 1."""
    monkeypatch.setattr(main_module, "load", lambda name: _Command(ending))
    assert main(["doctor"]) == code
    assert capsys.readouterr().err == err


def test_reader_that_leaves_early_is_no_traceback() -> None:
    """`antiphon doctor | true` ends quietly."""
    process = subprocess.Popen(
        [*ANTIPHON, "doctor", "--model", "scripted"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait(30)


@pytest.mark.parametrize("name", ["chat", "doctor", "kv", "serve"])
def test_light_commands_load_no_engine(name: str) -> None:
    """Commands that run no model do not import llama.cpp: a bad build must not take them down."""
    code = (
        f"from antiphon.cli.main import load; import sys; load({name!r}); print('llama_cpp' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout == "False\n"
