"""What `antiphon kv` looks at: what it is told of, else what belongs to a run here.

Owns the options, and what they mean where they are not given: the store, the workers and the tenants
of the one `antiphon serve` that runs as this user. A run is looked for only when something is missing.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from pathlib import Path

from antiphon.cli import database, kvoptions
from antiphon.cli.kvpages import WorkerPages
from antiphon.cli.kvtenants import Tenants
from antiphon.cli.options import read_secret
from antiphon.cli.runfolder import RunCard, living_runs
from antiphon.cli.state import state_folder
from antiphon.core.errors import BadRequest
from antiphon.kv.keys import match_blocks
from antiphon.kv.namespace import NAMESPACE_BYTES

_NOBODY = "no `antiphon serve` runs here"


def add_store_options(parser: argparse.ArgumentParser) -> None:
    """Which store, which run, whose tenants."""
    parser.add_argument(
        "--redis",
        type=kvoptions.store_url(),
        metavar="URL",
        help=f"the store (default: ${kvoptions.REDIS_VARIABLE}, else that of the `antiphon serve` here)",
    )
    parser.add_argument(
        "--url", metavar="URL", help="the `antiphon serve` here that is meant, where several run: its URL"
    )
    database.add_database_option(parser)
    database.add_scope_option(parser)


def add_worker_options(parser: argparse.ArgumentParser) -> None:
    """Which workers."""
    parser.add_argument(
        "--worker",
        action="append",
        metavar="URL",
        help="a worker's address; may stand repeatedly (default: those of the `antiphon serve` here)",
    )
    parser.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="file with the secret of those workers (default: that of the `antiphon serve` here)",
    )
    parser.add_argument(
        "--worker-ca",
        type=Path,
        metavar="FILE",
        help="PEM file: who vouches for workers at https addresses (default: the system's authorities)",
    )


def add_choice_options(parser: argparse.ArgumentParser) -> None:
    """Which blocks of the store."""
    parser.add_argument(
        "--namespace", type=_namespace, metavar="HEX", help="only blocks of this namespace (see `kv stats`)"
    )
    parser.add_argument("--tenant", metavar="NAME", help="only blocks of this tenant")


class Place:
    """The meaning of the options given. Every method raises BadRequest for what nobody says."""

    def __init__(self, args: argparse.Namespace, environ: Mapping[str, str]) -> None:
        self._args = args
        self._environ = environ

    @functools.cached_property
    def run(self) -> RunCard | None:
        """The run here that is meant; None where there is none."""
        cards = living_runs(state_folder(self._environ))
        url = self._args.url
        if url is not None:
            wanted = url.rstrip("/").removesuffix("/v1")
            cards = [card for card in cards if card.gateway == wanted]
            if not cards:
                raise BadRequest(f"--url {url}: no `antiphon serve` of yours runs there")
        if len(cards) > 1:
            urls = ", ".join(sorted(card.gateway for card in cards))
            raise BadRequest(f"several `antiphon serve` run here: say which with --url ({urls})")
        return cards[0] if cards else None

    def store(self) -> str | None:
        """The store's URL; None where there is none."""
        said = kvoptions.chosen_store(self._args.redis, self._environ, "")
        if said == kvoptions.NONE:
            return None
        return said or (self.run.redis if self.run is not None else None)

    def needed_store(self) -> str:
        """The store's URL."""
        store = self.store()
        if store is not None:
            return store
        if kvoptions.chosen_store(self._args.redis, self._environ, "") == kvoptions.NONE:
            raise BadRequest(f"${kvoptions.REDIS_VARIABLE} says there is no store; name one with --redis URL")
        if self.run is None:
            raise BadRequest(f"{_NOBODY}; name the store: --redis URL")
        raise BadRequest(f"the `antiphon serve` at {self.run.gateway} has no store")

    def workers(self) -> list[WorkerPages]:
        """The workers' pages."""
        urls, file = self._args.worker, self._args.secret_file
        if urls is None:
            if self.run is None:
                raise BadRequest(f"{_NOBODY}; name its workers: --worker URL --secret-file FILE")
            urls = self.run.workers
        elif file is None:
            raise BadRequest(
                "--worker needs --secret-file FILE, the secret those workers share with gateways"
            )
        if file is None:
            assert self.run is not None
            file = Path(self.run.secret_file)
        secret = read_secret(file)
        return [WorkerPages(url, secret, self._args.worker_ca) for url in urls]

    def tenants(self) -> Tenants:
        """The tenants of the gateway's database."""
        return Tenants.load(self.database(), self._scope_secret())

    def database(self) -> str:
        """The URL of the gateway's database."""
        return database.database_of(self._places, self._environ)

    def match_erased(self, tenant_id: str) -> str:
        """A pattern for the keys of all blocks of a tenant, which need not be known any more."""
        return match_blocks(scope_tag=Tenants.tag_of_id(self._scope_secret(), tenant_id))

    def _scope_secret(self) -> bytes:
        return database.scope_secret_of(self._places, self._environ)

    @functools.cached_property
    def _places(self) -> argparse.Namespace:
        """Database and secret as was said, else those of the run here."""
        url, file = database.said_database(self._args, self._environ), self._args.scope_secret_file
        if (url is None or file is None) and self.run is not None:
            url, file = url or self.run.database, file or _path(self.run.scope_secret_file)
        return argparse.Namespace(database=url, scope_secret_file=file)

    def match(self) -> str:
        """A pattern for the keys of the blocks that were chosen."""
        tenant = self._args.tenant
        tag = None if tenant is None else self.tenants().tag_of(tenant)
        return match_blocks(self._args.namespace, tag)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _namespace(text: str) -> bytes:
    try:
        namespace = bytes.fromhex(text)
    except ValueError:
        namespace = b""
    if len(namespace) != NAMESPACE_BYTES:
        raise argparse.ArgumentTypeError(f"a namespace is {2 * NAMESPACE_BYTES} hexadecimal digits")
    return namespace
