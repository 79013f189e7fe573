"""`antiphon kv probe`: where the blocks of a prompt lie: in which worker's memory, in the store, nowhere.

Does what the gateway and a worker do with the same prompt of the same tenant: template, tokens, block
hashes. Reads nothing but hashes and keys, and changes no block's place in any queue of eviction.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from antiphon.cli import kvplace
from antiphon.cli.kvplace import Place, WorkerSilent, ask_worker
from antiphon.cli.kvtenants import Tenants
from antiphon.cli.models import find_model
from antiphon.core.blockhash import Border, extend_chain, root_of
from antiphon.core.errors import BadRequest
from antiphon.kv.admin import open_admin
from antiphon.kv.keys import block_key, scope_tag
from antiphon.worker.kvinfo import KvHeld, KvInfo

HELP = "Show where the blocks of a prompt lie: in a worker's memory, in the store, nowhere."
EXAMPLE = "  antiphon kv probe --chat request.json\n  antiphon kv probe --text 'Once upon a time'"
_STORE = "redis"


@dataclass(frozen=True, slots=True)
class Found:
    """A block of the prompt. `places`: `engine@WORKER`, `host@WORKER`, `redis`."""

    index: int
    hash: str
    places: list[str]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The action's options."""
    kvplace.add_store_options(parser)
    kvplace.add_worker_options(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--text", metavar="TEXT", help="a bare prompt, as for /v1/completions")
    prompt.add_argument(
        "--chat",
        metavar="FILE|-",
        help="a body of /v1/chat/completions, or its list of messages, as JSON; -: from stdin",
    )
    parser.add_argument("--tenant", default="local", metavar="NAME", help="whose prompt it is")
    parser.add_argument(
        "--model", metavar="NAME|PATH.gguf", help="model (default: what the `antiphon serve` here was told)"
    )
    parser.add_argument(
        "--catalogue", type=Path, metavar="FILE", help="models.toml whose entries add to the built-in ones"
    )


def run(args: argparse.Namespace) -> int:
    """Print a line a block. Raises BadRequest, StoreFault."""
    place = kvplace.find_place(args, os.environ)
    infos, held = _ask(place)
    if not infos:
        raise BadRequest("no worker answers; without one nobody knows the namespace")
    if len({(info.namespace, info.block_tokens) for info in infos}) > 1:
        raise BadRequest("these workers have several namespaces; name one with --worker")
    token_ids = _token_ids(args, place)
    scope = Tenants.load(os.environ).scope_of(args.tenant)
    chain = Chain.of(infos[0], scope, token_ids)
    in_store = _in_store(place.store, chain.keys)
    blocks = list(located(chain.hashes, held, in_store))
    if args.json:
        print(json.dumps({"num_tokens": len(token_ids), "blocks": [asdict(block) for block in blocks]}))
    else:
        print("\n".join(_lines(blocks, len(token_ids), infos[0].block_tokens)))
    return 0


@dataclass(frozen=True, slots=True)
class Chain:
    """The hashes of a prompt's full blocks in a namespace, and their keys in the store."""

    hashes: list[str]
    keys: list[str]

    @classmethod
    def of(cls, info: KvInfo, scope: bytes, token_ids: Sequence[int]) -> Chain:
        """As a worker with this `info` derives them."""
        namespace = bytes.fromhex(info.namespace)
        border = Border(0, scope)
        hashes: list[bytes] = []
        root = root_of(namespace, scope, border.num_public_tokens, info.block_tokens)
        extend_chain(hashes, root, token_ids, info.block_tokens, border)
        keys = [
            block_key(namespace, scope_tag(border.scope_of(index, info.block_tokens)), block_hash)
            for index, block_hash in enumerate(hashes)
        ]
        return cls([block_hash.hex() for block_hash in hashes], keys)


def located(hashes: Sequence[str], held: Mapping[str, KvHeld], in_store: Sequence[bool]) -> Iterator[Found]:
    """Each block with all of its places, nearest first. `held`: by worker."""
    tiers = [(f"engine@{worker}", frozenset(page.engine)) for worker, page in held.items()]
    tiers += [(f"host@{worker}", frozenset(page.host)) for worker, page in held.items()]
    for index, (block_hash, is_stored) in enumerate(zip(hashes, in_store, strict=True)):
        places = [name for name, members in tiers if block_hash in members]
        yield Found(index, block_hash, [*places, _STORE] if is_stored else places)


def _token_ids(args: argparse.Namespace, place: Place) -> list[int]:
    entry = find_model(args.model or place.model, args.catalogue or place.catalogue, None)
    # By name and now, so that no other action of `antiphon kv` depends on llama.cpp's being sound.
    tokenizing = importlib.import_module("antiphon.cli.kvprompt")
    ids: list[int]
    if args.text is not None:
        ids = tokenizing.text_ids(entry, args.text)
        return ids
    try:
        body = sys.stdin.buffer.read() if args.chat == "-" else Path(args.chat).read_bytes()
    except OSError as error:
        raise BadRequest(f"--chat {args.chat}: {error.strerror}") from error
    ids = tokenizing.chat_ids(entry, body)
    return ids


def _ask(place: Place) -> tuple[list[KvInfo], dict[str, KvHeld]]:
    """What the workers say that answer."""
    infos: list[KvInfo] = []
    held: dict[str, KvHeld] = {}
    for worker in place.workers:
        try:
            info = ask_worker(worker, "/kv", place.secret, KvInfo)
            held[info.worker] = ask_worker(worker, "/kv/held", place.secret, KvHeld)
            infos.append(info)
        except WorkerSilent as silence:
            print(f"antiphon kv probe: {silence}", file=sys.stderr)
    return infos, held


def _in_store(url: str | None, keys: Sequence[str]) -> list[bool]:
    if url is None or not keys:
        return [False] * len(keys)
    with open_admin(url) as admin:
        return [size is not None for size in admin.sizes(keys)]


def _lines(blocks: Sequence[Found], num_tokens: int, block_tokens: int) -> Iterator[str]:
    for block in blocks:
        first = block.index * block_tokens
        places = ", ".join(block.places) or "-"
        yield f"{block.index:>5}  tokens {first}–{first + block_tokens - 1:<8}{block.hash[:16]}  {places}"
    reusable = next((block.index for block in blocks if not block.places), len(blocks))
    yield (
        f"{num_tokens} tokens, {len(blocks)} full blocks of {block_tokens}; "
        f"the first {reusable} blocks ({reusable * block_tokens} tokens) need not be computed"
    )
