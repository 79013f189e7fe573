"""The folder of one run of `antiphon serve`: its secret, its sockets, and what other commands may know.

Owns `run/<name>/` in the state folder, where each run has a folder of its own, so that two of them on
one machine do not meet. A lock that dies with its process says which run lives: folders of runs that
were killed are removed by the next one. Where the state folder lies too deep for the path of a unix
socket, the runs lie in the folder for temporary files.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from antiphon.core.errors import BadRequest

_MAX_SOCKET_BYTES = 107  # of a unix socket's path; the system's limit
_DEEPEST = "run-01234567/control.sock"  # like the deepest that lies below the runs
_CARD = "run.json"


class RunCard(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run's parts are. Lies beside the secrets: nobody else may read it."""

    gateway: str
    workers: list[str]
    secret_file: str
    redis: str | None  # the store's URL
    control: str | None = None  # the control Redis' URL
    model: str
    catalogue: str | None
    database: str | None  # these three: as was said; None: in their default places
    scope_secret_file: str | None
    public_prefix_file: str | None

    def write(self, folder: Path) -> None:
        """Let other commands find this run."""
        draft = folder / f".{_CARD}"
        draft.touch(0o600)
        draft.write_bytes(msgspec.json.encode(self))
        draft.replace(folder / _CARD)


@contextmanager
def run_folder(state: Path) -> Iterator[Path]:
    """A folder for this run, gone at its end. Raises BadRequest."""
    runs = _runs(state)
    try:
        with _locked(runs, wait=True):  # between the making of a folder and its lock no other run sweeps
            _sweep(runs)
            folder = Path(tempfile.mkdtemp(prefix="run-", dir=runs))
            lock = _lock(folder, wait=True)  # held at most by who looks whether it lives
    except OSError as error:
        raise BadRequest(f"cannot keep a run's files in {runs}: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def living_runs(state: Path) -> list[RunCard]:
    """The runs of this user that are ready now. Raises BadRequest."""
    return [card for folder in sorted(_runs(state).glob("run-*")) if (card := _card(folder)) is not None]


def _card(folder: Path) -> RunCard | None:
    try:
        with _locked(folder, wait=False):
            return None  # nobody holds it: what lies there was left behind
    except BlockingIOError:
        pass
    except OSError:
        return None
    try:
        return msgspec.json.decode((folder / _CARD).read_bytes(), type=RunCard)
    except (OSError, msgspec.DecodeError):
        return None


def _runs(state: Path) -> Path:
    """The folder of the runs, made where missing and private. Raises BadRequest."""
    runs = state / "run"
    if len(os.fsencode(runs / _DEEPEST)) > _MAX_SOCKET_BYTES:
        digest = hashlib.sha256(os.fsencode(state)).hexdigest()[:8]
        runs = Path(tempfile.gettempdir()) / f"antiphon-{os.getuid()}-{digest}"
    try:
        runs.mkdir(mode=0o700, exist_ok=True)
        status = runs.lstat()
    except OSError as error:
        raise BadRequest(f"cannot keep a run's files in {runs}: {error.strerror}") from error
    is_private = stat.S_ISDIR(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077
    if not is_private or status.st_uid != os.getuid():
        raise BadRequest(f"{runs} is not a folder that only you may enter; remove it")
    return runs


def _sweep(runs: Path) -> None:
    """Remove what killed runs have left."""
    for folder in runs.glob("run-*"):
        try:
            with _locked(folder, wait=False):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # it lives, or another one was faster


@contextmanager
def _locked(folder: Path, *, wait: bool) -> Iterator[None]:
    lock = _lock(folder, wait=wait)
    try:
        yield
    finally:
        os.close(lock)


def _lock(folder: Path, *, wait: bool) -> int:
    """Lock a folder for as long as the descriptor is open. Raises OSError (BlockingIOError: it is held)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
