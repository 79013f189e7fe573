"""The state folder and the secrets that stand in it."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from antiphon.cli.state import SECRET_BYTES, standing_secret, state_folder
from antiphon.core.errors import BadRequest


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    """The folder is made below XDG_STATE_HOME, closed to others, and found again."""
    folder = state_folder({"XDG_STATE_HOME": str(tmp_path)})
    assert folder == tmp_path / "antiphon"
    assert _mode(folder) == 0o700
    assert state_folder({"XDG_STATE_HOME": str(tmp_path)}) == folder


@pytest.mark.parametrize("xdg", [{}, {"XDG_STATE_HOME": ""}, {"XDG_STATE_HOME": "state"}])
def test_default_lies_in_the_home(tmp_path: Path, xdg: dict[str, str]) -> None:
    """Without an absolute XDG_STATE_HOME it is ~/.local/state/antiphon."""
    assert state_folder({"HOME": str(tmp_path)} | xdg) == tmp_path / ".local" / "state" / "antiphon"


def test_open_folder_is_closed(tmp_path: Path) -> None:
    """A folder that others could read is theirs no longer."""
    (tmp_path / "antiphon").mkdir(mode=0o755)
    assert _mode(state_folder({"XDG_STATE_HOME": str(tmp_path)})) == 0o700


def test_folder_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    """A file in its place, or no home at all, is said in a line that names the way out."""
    (tmp_path / "antiphon").touch()
    for environ in ({"XDG_STATE_HOME": str(tmp_path)}, {}):
        with pytest.raises(BadRequest, match="set XDG_STATE_HOME"):
            state_folder(environ)


def test_foreign_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of another user is not used: they could swap what lies in it."""
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(BadRequest, match="belongs to another user"):
        state_folder({"XDG_STATE_HOME": str(tmp_path)})


def test_secret_is_made_once(tmp_path: Path) -> None:
    """The first to ask makes it, readable by this user alone; all later ones read the same."""
    file = tmp_path / "secret"
    made = standing_secret(file)
    assert len(made) == SECRET_BYTES
    assert _mode(file) == 0o600
    assert standing_secret(file) == made
    assert list(tmp_path.iterdir()) == [file]


def test_many_at_once_agree(tmp_path: Path) -> None:
    """Processes that start together all end up with one secret."""
    with ThreadPoolExecutor(16) as pool:
        made = set(pool.map(standing_secret, [tmp_path / "secret"] * 64))
    assert len(made) == 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("text", ["", "zz", "00" * (SECRET_BYTES - 1), "00" * (SECRET_BYTES + 1), "é"])
def test_broken_secret_is_not_used(tmp_path: Path, text: str) -> None:
    """A file that holds no whole secret stops the start instead of weakening it."""
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text(text)
    with pytest.raises(BadRequest, match="does not hold"):
        standing_secret(file)


def test_secret_without_a_place_is_an_error(tmp_path: Path) -> None:
    """A folder that is not there is said, with the file's name."""
    with pytest.raises(BadRequest, match="No such file"):
        standing_secret(tmp_path / "none" / "secret")
