"""The folders of runs: private, apart, and gone when their run is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from antiphon.cli import runfolder
from antiphon.cli.runfolder import RunCard, living_runs, run_folder
from antiphon.core.errors import BadRequest

PATIENCE_S = 20.0
# A run in a process of its own: says its folder, then waits for the end of stdin.
_RUN = """
import sys
from pathlib import Path
from antiphon.cli.runfolder import run_folder
with run_folder(Path(sys.argv[1])) as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state folder near the root, as users have one: paths of sockets are short."""
    folder = tmp_path / "state"
    folder.mkdir(0o700)
    return folder


@contextmanager
def other_run(state: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run in another process, and its folder."""
    with subprocess.Popen(
        [sys.executable, "-c", _RUN, str(state)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def _card(redis: str | None = None) -> RunCard:
    return RunCard(
        gateway="http://127.0.0.1:1",
        workers=["http://127.0.0.1:2"],
        secret_file="s",
        redis=redis,
        model="scripted",
        catalogue=None,
        database=None,
        scope_secret_file=None,
        public_prefix_file=None,
    )


def test_folder_is_private_and_gone_at_the_end(state: Path) -> None:
    """Only this user may enter, and only while the run lasts."""
    with run_folder(state) as folder:
        assert folder.stat().st_mode & 0o077 == 0
        assert folder.parent.stat().st_mode & 0o077 == 0
        (folder / "file").touch()
    assert not folder.exists()


def test_two_runs_do_not_meet(state: Path) -> None:
    """Each has a folder of its own, and both are found."""
    with run_folder(state) as one, run_folder(state) as two:
        assert one != two
        _card("unix:///1").write(one)
        _card("unix:///2").write(two)
        assert {card.redis for card in living_runs(state)} == {"unix:///1", "unix:///2"}
    assert living_runs(state) == []


def test_run_that_is_not_ready_is_not_found(state: Path) -> None:
    """A run without a card, or with half of one, has nothing to offer yet."""
    with run_folder(state) as folder:
        assert living_runs(state) == []
        (folder / "run.json").write_text('{"gateway":')
        assert living_runs(state) == []
        _card().write(folder)
        assert living_runs(state) == [_card()]


def test_card_is_for_this_user_only(state: Path) -> None:
    """It may hold a URL with a password."""
    with run_folder(state) as folder:
        _card("redis://:secret@host").write(folder)
        assert (folder / "run.json").stat().st_mode & 0o077 == 0


def test_leftovers_of_a_killed_run_are_not_found_and_removed_by_the_next(state: Path) -> None:
    """The lock dies with its process, whatever killed it; a living run's folder stays."""
    with other_run(state) as (killed, left), other_run(state) as (_, living):
        _card().write(left)
        _card().write(living)
        assert len(living_runs(state)) == 2
        killed.kill()
        killed.wait(PATIENCE_S)
        assert len(living_runs(state)) == 1
        assert left.exists()
        with run_folder(state):
            assert not left.exists()
            assert living.exists()


def test_deep_state_folder_gets_runs_with_short_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A unix socket's path has a hard limit: the runs then lie elsewhere, still private, still found."""
    short = Path(tempfile.mkdtemp(dir="/tmp"))
    request.addfinalizer(lambda: shutil.rmtree(short))
    monkeypatch.setattr("tempfile.tempdir", str(short))
    state = tmp_path / ("deep" * 30)
    state.mkdir()
    other = tmp_path / ("peed" * 30)
    other.mkdir()
    with run_folder(state) as folder:
        assert state not in folder.parents
        assert len(os.fsencode(folder / "control.sock")) < 107
        assert folder.parent.stat().st_mode & 0o077 == 0
        _card().write(folder)
        assert living_runs(state) == [_card()]
        assert living_runs(other) == []


@pytest.mark.parametrize("squat", ["open", "link", "file"])
def test_folder_that_others_may_enter_is_refused(
    squat: str, tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was there first in a common folder, with an open folder, a link or a file, gets no secret."""
    runs = state / "run"
    if squat == "open":
        runs.mkdir()
        runs.chmod(0o777)
    elif squat == "link":
        (tmp_path / "elsewhere").mkdir(0o700)
        runs.symlink_to(tmp_path / "elsewhere")
    else:
        runs.touch()
    with pytest.raises(BadRequest, match="run"), run_folder(state):
        pass


def test_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    """The refusal names the folder and the reason."""
    with pytest.raises(BadRequest, match=r"run: No such file"), run_folder(tmp_path / "nowhere"):
        pass


def test_limit_is_the_systems() -> None:
    """A path of this length can be bound, one more cannot."""
    import socket
    import tempfile

    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as listener:
        name = folder + "/" + "s" * (runfolder._MAX_SOCKET_BYTES - len(folder) - 1)
        with pytest.raises(OSError, match="too long"):
            listener.bind(name + "s")
        listener.bind(name)
