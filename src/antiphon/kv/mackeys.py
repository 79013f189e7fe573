"""The secrets that authenticate KV blocks, and the file the operator keeps them in.

One text file, readable by its owner (and group) alone::

    antiphon-mac-keys 1
    current 1f0c9a3b <64 hex digits>
    previous 77ab01e2 <64 hex digits>
    retired 5c0d91aa

`current` signs; `previous`, there while a rotation is under way, is still believed. Workers read the
file when they start: after `rotate` restart them one by one, and rotate again only when the longest
TTL has passed. A retired key is its number alone, kept so that what it signed can be told from what a
newer key did: the former is deleted where it is met, the latter, signed with a key that is not in the
file (yet), is a miss and left to those who know it. A number is derived from its secret, so a damaged
line is noticed. The file appears whole or not at all, and processes that make it at the same time end up
with one and the same key.

The secret itself signs nothing: each use has a key derived for it (`MacKey.mac`). Losing the file
costs the cached blocks and nothing else; whoever can read it can forge them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from blake3 import blake3

SECRET_BYTES = 32
KEY_ID_BYTES = 4

_HEAD = "antiphon-mac-keys 1"
_ROLES = ("current", "previous")
_RETIRED = "retired"
_MOST_RETIRED = 16  # the latest: values of earlier ones have long expired
_MOST_BYTES = 4096
_NOT_OURS = 0o027  # group may read (a mounted secret), nobody else anything
_ID_CONTEXT = "antiphon 2026-11-30 kv MAC key id v1"
_MAC_CONTEXT = "antiphon 2026-11-30 kv block MAC key v1"


class MacKeyError(Exception):
    """The key file cannot be used; the message says why and what to do. It never holds a secret."""


class NoMacKeys(MacKeyError):
    """There is no key file."""


@dataclass(frozen=True, slots=True)
class MacKey:
    """What is derived from one secret: its public number and the key of the block MAC."""

    id: bytes
    mac: bytes = field(repr=False)
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: bytes) -> Self:
        """ValueError where the secret has the wrong length."""
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a MAC secret has {SECRET_BYTES} bytes, not {len(secret)}")
        number = blake3(secret, derive_key_context=_ID_CONTEXT).digest(KEY_ID_BYTES)
        return cls(number, blake3(secret, derive_key_context=_MAC_CONTEXT).digest(), secret)


@dataclass(frozen=True, slots=True)
class MacKeys:
    """The key that signs, and the one before it while its blocks are still believed.

    `retired`: numbers of keys that are believed no more, latest first.
    """

    current: MacKey
    previous: MacKey | None = None
    retired: tuple[bytes, ...] = ()

    def find(self, key_id: bytes) -> MacKey | None:
        """The valid key of this number."""
        if key_id == self.current.id:
            return self.current
        if self.previous is not None and key_id == self.previous.id:
            return self.previous
        return None


def load(path: Path) -> MacKeys:
    """Read the file. Raises NoMacKeys, MacKeyError."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            data = file.read(_MOST_BYTES)
    except FileNotFoundError:
        raise NoMacKeys(f"There is no MAC key file {path}.") from None
    except OSError as error:
        raise MacKeyError(f"The MAC key file {path} cannot be read: {error.strerror}.") from None
    if mode & _NOT_OURS:
        raise MacKeyError(
            f"The MAC key file {path} is open to others (mode {mode:03o}). Run: chmod 600 {path}"
        )
    try:
        return _parse(data)
    except ValueError:
        raise MacKeyError(
            f"The MAC key file {path} is damaged. Restore it, or remove it to have a new one made: "
            "KV blocks cached so far are then computed again."
        ) from None


def load_or_create(path: Path) -> MacKeys:
    """Read the file, or make it with a fresh key. Raises MacKeyError."""
    try:
        return load(path)
    except NoMacKeys:
        fresh = MacKeys(_fresh_key())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _written(path, fresh) as whole:
            os.link(whole, path)  # fails where another process was first
    except FileExistsError:
        return load(path)
    except OSError as error:
        raise MacKeyError(f"The MAC key file {path} cannot be made: {error.strerror}.") from None
    return fresh


def rotate(path: Path) -> MacKeys:
    """Make a fresh key the current one and the current one the previous; an older one retires.

    Raises NoMacKeys, MacKeyError.
    """
    try:
        with _alone(path.parent):
            before = load(path)
            retired = before.retired if before.previous is None else (before.previous.id, *before.retired)
            keys = MacKeys(_fresh_key(), before.current, retired[:_MOST_RETIRED])
            with _written(path, keys) as whole:
                os.replace(whole, path)
    except FileNotFoundError:
        raise NoMacKeys(f"There is no MAC key file {path}.") from None
    except BlockingIOError:
        raise MacKeyError(f"The MAC key file {path} is being rotated by another process.") from None
    except OSError as error:
        raise MacKeyError(f"The MAC key file {path} cannot be rotated: {error.strerror}.") from None
    return keys


def _fresh_key() -> MacKey:
    return MacKey.of(secrets.token_bytes(SECRET_BYTES))


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Nobody else is in here. BlockingIOError where somebody is."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _written(path: Path, keys: MacKeys) -> Iterator[Path]:
    """A file beside `path`, complete and on disk; gone afterwards unless it was renamed."""
    whole = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        try:
            file.write(_format(keys))
            file.flush()
            os.fsync(file.fileno())
            yield whole
        finally:
            whole.unlink(missing_ok=True)


def _format(keys: MacKeys) -> bytes:
    lines = [
        f"{role} {key.id.hex()} {key.secret.hex()}"
        for role, key in zip(_ROLES, (keys.current, keys.previous), strict=True)
        if key is not None
    ]
    lines += [f"{_RETIRED} {number.hex()}" for number in keys.retired]
    return ("\n".join([_HEAD, *lines]) + "\n").encode()


def _parse(data: bytes) -> MacKeys:
    """ValueError where anything is not as `_format` writes it."""
    head, *lines = data.decode("ascii").splitlines()
    retired = [line for line in lines if line.startswith(f"{_RETIRED} ")]
    valid = lines[: len(lines) - len(retired)]
    if head != _HEAD or not 1 <= len(valid) <= len(_ROLES) or len(retired) > _MOST_RETIRED:
        raise ValueError("not a MAC key file")
    found = [_parse_key(role, line) for role, line in zip(_ROLES, valid, strict=False)]
    return MacKeys(found[0], found[1] if len(found) > 1 else None, tuple(map(_parse_retired, retired)))


def _parse_key(role: str, line: str) -> MacKey:
    found_role, number, secret = line.split()
    key = MacKey.of(bytes.fromhex(secret))
    if (found_role, number) != (role, key.id.hex()):
        raise ValueError("a damaged key")
    return key


def _parse_retired(line: str) -> bytes:
    _, number = line.split()
    key_id = bytes.fromhex(number)
    if len(key_id) != KEY_ID_BYTES:
        raise ValueError("a damaged number")
    return key_id
