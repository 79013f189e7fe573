"""Which store and which workers `antiphon kv` looks at: those it is told of, else those of a run here.

Owns the options, and the asking of a worker's `/kv` pages (worker/kvinfo.py). What is not said on the
command line or in the environment comes from the one `antiphon serve` that runs as this user.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx2
import msgspec

from antiphon.cli import kvoptions
from antiphon.cli.kvtenants import Tenants
from antiphon.cli.options import DEFAULT_MODEL, read_secret
from antiphon.cli.runfolder import RunCard, living_runs
from antiphon.cli.state import state_folder
from antiphon.core.errors import BadRequest
from antiphon.kv.keys import match_blocks
from antiphon.kv.namespace import NAMESPACE_BYTES
from antiphon.worker.kvinfo import KvHeld, KvInfo

_TIMEOUT_S = 5.0
_NOBODY = "no `antiphon serve` runs here"

P = TypeVar("P", KvInfo, KvHeld)


class WorkerSilent(Exception):
    """A worker did not say what it was asked; the text says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What there is to look at."""

    store: str | None  # a URL
    workers: tuple[str, ...]
    secret: str
    model: str
    catalogue: Path | None


def add_store_options(parser: argparse.ArgumentParser) -> None:
    """Which store, which run."""
    parser.add_argument(
        "--redis",
        type=kvoptions.store_url(),
        metavar="URL",
        help=f"the store (default: ${kvoptions.REDIS_VARIABLE}, else that of the `antiphon serve` here)",
    )
    parser.add_argument(
        "--url", metavar="URL", help="the `antiphon serve` here that is meant, where several run: its URL"
    )


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


def add_choice_options(parser: argparse.ArgumentParser) -> None:
    """Which blocks of the store."""
    parser.add_argument(
        "--namespace", type=_namespace, metavar="HEX", help="only blocks of this namespace (see `kv stats`)"
    )
    parser.add_argument("--tenant", metavar="NAME", help="only blocks of this tenant")


def chosen_blocks(args: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """A pattern for the chosen blocks' keys. Raises BadRequest."""
    tag = None if args.tenant is None else Tenants.load(environ).tag_of(args.tenant)
    return match_blocks(args.namespace, tag)


def find_store(args: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """The store's URL. Raises BadRequest."""
    said = kvoptions.chosen_store(args.redis, environ, "")
    if said == kvoptions.NONE:
        raise BadRequest(f"${kvoptions.REDIS_VARIABLE} says there is no store; name one with --redis URL")
    if said:
        return said
    card = _run(args.url, environ)
    if card is None:
        raise BadRequest(f"{_NOBODY}; name the store: --redis URL")
    if card.redis is None:
        raise BadRequest(f"the `antiphon serve` at {card.gateway} has no store")
    return card.redis


def find_place(args: argparse.Namespace, environ: Mapping[str, str]) -> Place:
    """Store and workers. Raises BadRequest."""
    if args.worker is not None and args.secret_file is None:
        raise BadRequest("--worker needs --secret-file FILE, the secret those workers share with gateways")
    card = _run(args.url, environ)
    said = kvoptions.chosen_store(args.redis, environ, "")
    if card is None and args.worker is None:
        raise BadRequest(f"{_NOBODY}; name its workers: --worker URL --secret-file FILE")
    store = None if said == kvoptions.NONE else said or (card.redis if card else None)
    if args.worker is not None or card is None:
        workers, secret = tuple(args.worker), read_secret(args.secret_file)
    else:
        workers, secret = tuple(card.workers), read_secret(Path(card.secret_file))
    catalogue = Path(card.catalogue) if card is not None and card.catalogue is not None else None
    model = card.model if card is not None else DEFAULT_MODEL
    return Place(store=store, workers=workers, secret=secret, model=model, catalogue=catalogue)


def ask_worker(url: str, page: str, secret: str, form: type[P]) -> P:
    """A page of a worker. Raises WorkerSilent."""
    address = f"{url.rstrip('/')}{page}"
    try:
        # No proxy of the environment: the secret goes to the worker and nowhere else.
        reply = httpx2.get(
            address, headers={"Authorization": f"Bearer {secret}"}, timeout=_TIMEOUT_S, trust_env=False
        )
        if reply.status_code != 200:
            raise WorkerSilent(f"{address} answered {reply.status_code}")
        return msgspec.json.decode(reply.content, type=form)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise WorkerSilent(f"{address}: {error}") from error
    except msgspec.DecodeError as error:
        raise WorkerSilent(f"{address} is not of this version of Antiphon: {error}") from error


def _namespace(text: str) -> bytes:
    try:
        namespace = bytes.fromhex(text)
    except ValueError:
        namespace = b""
    if len(namespace) != NAMESPACE_BYTES:
        raise argparse.ArgumentTypeError(f"a namespace is {2 * NAMESPACE_BYTES} hexadecimal digits")
    return namespace


def _run(url: str | None, environ: Mapping[str, str]) -> RunCard | None:
    """The run that is meant; None where there is none. Raises BadRequest where there are several."""
    cards = living_runs(state_folder(environ))
    if url is not None:
        wanted = url.rstrip("/").removesuffix("/v1")
        cards = [card for card in cards if card.gateway == wanted]
        if not cards:
            raise BadRequest(f"--url {url}: no `antiphon serve` of yours runs there")
    if len(cards) > 1:
        urls = ", ".join(sorted(card.gateway for card in cards))
        raise BadRequest(f"several `antiphon serve` run here: say which with --url ({urls})")
    return cards[0] if cards else None
