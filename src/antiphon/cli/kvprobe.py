"""`antiphon kv probe`: where the blocks of a prompt lie: in which worker's memory, in the store, nowhere.

Does what the gateway and a worker do with the same prompt of the same tenant. Reads nothing but hashes
and keys, and changes no block's place in the order of eviction.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from antiphon.cli import database, kvplace
from antiphon.cli.kvchain import Chain, Found, Prompt, located
from antiphon.cli.kvpages import WorkerPages, WorkerSilent
from antiphon.cli.kvplace import Place
from antiphon.cli.models import find_model
from antiphon.cli.options import DEFAULT_MODEL
from antiphon.core.catalogue import ModelEntry
from antiphon.core.errors import BadRequest
from antiphon.kv.admin import open_admin
from antiphon.store.names import LOCAL_TENANT
from antiphon.worker.kvinfo import KvHeld, KvInfo

HELP = "Show where the blocks of a prompt lie: in a worker's memory, in the store, nowhere."
EXAMPLE = "  antiphon kv probe --chat request.json\n  antiphon kv probe --text 'Once upon a time'"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The action's options."""
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--text", metavar="TEXT", help="a bare prompt, as for /v1/completions")
    prompt.add_argument(
        "--chat",
        metavar="FILE|-",
        help="a body of /v1/chat/completions, or its list of messages, as JSON; -: from stdin",
    )
    parser.add_argument("--tenant", default=LOCAL_TENANT, metavar="NAME", help="whose prompt it is")
    parser.add_argument(
        "--model", metavar="NAME|PATH.gguf", help="model (default: that of the `antiphon serve` here)"
    )
    parser.add_argument(
        "--catalogue", type=Path, metavar="FILE", help="models.toml whose entries add to the built-in ones"
    )
    kvplace.add_store_options(parser)
    kvplace.add_worker_options(parser)
    database.add_public_prefix_option(parser)


def run(args: argparse.Namespace) -> int:
    """Print a line a block. Raises BadRequest, StoreFault."""
    place = Place(args, os.environ)
    infos, held = _ask(place.workers())
    if not infos:
        raise BadRequest("no worker answers; without one nobody knows the namespace")
    if len({(info.namespace, info.block_tokens) for info in infos}) > 1:
        raise BadRequest("these workers have several namespaces; name one with --worker")
    prompt = _prompt(args, place)
    scope = place.tenants().scope_of(
        args.tenant, cache_salt=prompt.cache_salt, prompt_cache_key=prompt.prompt_cache_key
    )
    chain = Chain.of(infos[0], prompt, scope)
    blocks = list(located(chain.hashes, held, _in_store(place.store(), chain.keys)))
    if args.json:
        report = {
            "num_tokens": len(prompt.token_ids),
            "num_public_tokens": prompt.num_public_tokens,
            "blocks": [asdict(block) for block in blocks],
        }
        print(json.dumps(report))
    else:
        print("\n".join(_lines(blocks, len(prompt.token_ids), infos[0].block_tokens)))
    return 0


def _prompt(args: argparse.Namespace, place: Place) -> Prompt:
    entry = _entry(args, place)
    systems = database.public_systems_of(_public_prefixes(args, place))
    # By name and now, so that no other action of `antiphon kv` depends on llama.cpp's being sound.
    making = importlib.import_module("antiphon.cli.kvprompt")
    made: Prompt
    if args.text is not None:
        made = making.text_prompt(entry, systems, args.text)
        return made
    try:
        body = sys.stdin.buffer.read() if args.chat == "-" else Path(args.chat).read_bytes()
    except OSError as error:
        raise BadRequest(f"--chat {args.chat}: {error.strerror}") from error
    made = making.chat_prompt(entry, systems, body)
    return made


def _entry(args: argparse.Namespace, place: Place) -> ModelEntry:
    if args.model is not None:
        return find_model(args.model, args.catalogue, None)
    if place.run is None:
        return find_model(DEFAULT_MODEL, args.catalogue, None)
    catalogue = None if place.run.catalogue is None else Path(place.run.catalogue)
    return find_model(place.run.model, args.catalogue or catalogue, None)


def _public_prefixes(args: argparse.Namespace, place: Place) -> argparse.Namespace:
    file = args.public_prefix_file
    if file is None and args.worker is None and place.run is not None:
        file = None if place.run.public_prefix_file is None else Path(place.run.public_prefix_file)
    return argparse.Namespace(public_prefix_file=file)


def _ask(workers: Sequence[WorkerPages]) -> tuple[list[KvInfo], dict[str, KvHeld]]:
    """What those workers say that answer."""
    infos: list[KvInfo] = []
    held: dict[str, KvHeld] = {}
    for worker in workers:
        try:
            info = worker.info()
            held[info.worker] = worker.held()
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
