"""The folder where Antiphon keeps what must outlive a run: the key database, secrets, Redis' sockets.

Invariants: the folder belongs to this user and nobody else may look into it; a secret file holds a
whole secret or is not there, however many processes start at once and whichever of them dies. Knows
nothing about what its users keep there.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from antiphon.core.errors import BadRequest

SECRET_BYTES = 32


def state_folder(environ: Mapping[str, str]) -> Path:
    """`$XDG_STATE_HOME/antiphon`, by default under ~/.local/state; made where missing. Raises BadRequest."""
    base = Path(environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():  # unset, empty or relative: the XDG rules say to take the default
        base = _home(environ) / ".local" / "state"
    folder = base / "antiphon"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid():
            raise BadRequest(f"{folder} belongs to another user; set XDG_STATE_HOME to a folder of your own")
        if stat.S_IMODE(status.st_mode) & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise BadRequest(
            f"cannot keep state in {folder}: {error.strerror}; set XDG_STATE_HOME to a folder of your own"
        ) from error
    return folder


def standing_secret(file: Path) -> bytes:
    """The secret in `file`, `SECRET_BYTES` long; made by whoever asks first. Raises BadRequest."""
    try:
        if not file.exists():
            _make_secret(file)
        text = file.read_text("ascii").strip()
        secret = bytes.fromhex(text)
    except OSError as error:
        raise BadRequest(f"{file}: {error.strerror}") from error
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise BadRequest(
            f"{file} does not hold {SECRET_BYTES} bytes in hexadecimal digits; delete it for a new one"
        )
    return secret


def _make_secret(file: Path) -> None:
    """Write beside and link into place: nobody ever reads half of it, and the first one wins."""
    draft = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as out:
            out.write(f"{secrets.token_hex(SECRET_BYTES)}\n")
            out.flush()
            os.fsync(out.fileno())
        try:
            os.link(draft, file)
        except FileExistsError:
            return  # another process was first
    finally:
        draft.unlink(missing_ok=True)


def _home(environ: Mapping[str, str]) -> Path:
    home = environ.get("HOME", "")
    if not home:
        raise BadRequest("neither HOME nor XDG_STATE_HOME is set; set XDG_STATE_HOME to a folder of your own")
    return Path(home)
