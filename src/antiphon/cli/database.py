"""Where commands find the database of keys, the secret of scopes and the public prefixes.

Owns their options, their default places in the state folder, and how a database that does not answer
is told to the person at the terminal.

A database's URL may hold a password, and everybody on a machine may read command lines: where no option
is given it comes from $ANTIPHON_DATABASE_URL, and `antiphon serve` hands it to its gateway that way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from antiphon.cli.state import standing_secret, state_folder
from antiphon.core.errors import BadRequest, StoreUnavailable
from antiphon.gateway.callers import is_loopback, require_guard
from antiphon.store.database import Database, check_url, file_url, shown_url
from antiphon.store.keys import KeyStore

DATABASE_VARIABLE = "ANTIPHON_DATABASE_URL"
_DATABASE_FILE = "antiphon.db"
_SCOPE_SECRET_FILE = "scope-secret"
_MAX_PREFIXES = 256
_GATEWAY_OPTIONS = ("scope_secret_file", "public_prefix_file")


def add_database_option(parser: argparse.ArgumentParser) -> None:
    """Where tenants and keys are."""
    parser.add_argument(
        "--database",
        metavar="URL",
        help="database of tenants and keys: sqlite:///FILE or postgresql://USER@HOST/DATABASE "
        f"(default: ${DATABASE_VARIABLE}, else antiphon.db in the state folder)",
    )


def add_scope_options(parser: argparse.ArgumentParser) -> None:
    """Who shares KV with whom."""
    add_scope_option(parser)
    add_public_prefix_option(parser)


def add_scope_option(parser: argparse.ArgumentParser) -> None:
    """What keeps tenants apart."""
    parser.add_argument(
        "--scope-secret-file",
        type=Path,
        metavar="FILE",
        help="secret that keeps tenants' KV apart, made where missing; gateways of a fleet share it "
        "(default: scope-secret in the state folder)",
    )


def add_public_prefix_option(parser: argparse.ArgumentParser) -> None:
    """What they share all the same."""
    parser.add_argument(
        "--public-prefix-file",
        type=Path,
        metavar="FILE",
        help="TOML file of system prompts whose KV all tenants may share: [[prefix]] with system = TEXT",
    )


def database_of(args: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """The URL asked for, or that of the default place. Raises BadRequest."""
    return said_database(args, environ) or file_url(state_folder(environ) / _DATABASE_FILE)


def said_database(args: argparse.Namespace, environ: Mapping[str, str]) -> str | None:
    """The URL asked for, by option or environment; None: that of the default place. Raises BadRequest."""
    option: str | None = args.database
    if option is not None:
        check_url(option)
        return option
    url = environ.get(DATABASE_VARIABLE) or None
    if url is not None:
        try:
            check_url(url)
        except BadRequest as error:
            raise BadRequest(f"${DATABASE_VARIABLE}: {error.message}") from error
    return url


def scope_secret_of(args: argparse.Namespace, environ: Mapping[str, str]) -> bytes:
    """The secret, made where it is not there yet. Raises BadRequest."""
    return standing_secret(args.scope_secret_file or state_folder(environ) / _SCOPE_SECRET_FILE)


class _Prefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    system: str


class _PrefixFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefix: list[_Prefix] = []


def public_systems_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The system prompts in the file that was named. Raises BadRequest."""
    file = args.public_prefix_file
    if file is None:
        return ()
    try:
        found = msgspec.convert(tomllib.loads(file.read_text("utf-8")), _PrefixFile).prefix
    except OSError as error:
        raise BadRequest(f"--public-prefix-file {file}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise BadRequest(f"--public-prefix-file {file}: {error}") from error
    if len(found) > _MAX_PREFIXES:
        raise BadRequest(f"--public-prefix-file {file}: more than {_MAX_PREFIXES} prefixes")
    return tuple(prefix.system for prefix in found)


def check_gateway(args: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Find out early what would stop a gateway from starting. Raises BadRequest, StoreUnavailable."""
    url = database_of(args, environ)
    public_systems_of(args)
    has_keys = args.require_key  # and while there are none nobody may
    if not has_keys and not is_loopback(args.host):
        with told(url):
            has_keys = asyncio.run(_has_keys(url))
    require_guard(args.host, has_keys=has_keys, behind_proxy=args.behind_proxy)


def gateway_environ(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """What a gateway that `serve` starts finds in its environment. Raises BadRequest."""
    url = said_database(args, environ)
    return {} if url is None else {DATABASE_VARIABLE: url}


def gateway_arguments(args: argparse.Namespace) -> list[str]:
    """The other options as a command line again, for a gateway that `serve` starts."""
    given = {name: getattr(args, name) for name in _GATEWAY_OPTIONS}
    return [
        part
        for name, value in given.items()
        if value is not None
        for part in ("--" + name.replace("_", "-"), str(value))
    ]


async def _has_keys(url: str) -> bool:
    database = await Database.open(url)
    try:
        return await KeyStore(database).has_any()
    finally:
        await database.close()


@contextlib.contextmanager
def told(url: str) -> Iterator[None]:
    """Say of a database that does not answer which one it is, and what it said."""
    try:
        yield
    except StoreUnavailable as error:
        raise StoreUnavailable(
            f"the database {shown_url(url)}: {error.detail}", detail=error.detail
        ) from error
