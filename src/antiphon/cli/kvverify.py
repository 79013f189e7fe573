"""`antiphon kv verify`: checks the MAC of a sample of the store's blocks.

Reads only. A worker that meets a bad value removes it by itself; many of them mean that somebody
writes to the store who should not, or that workers do not share their keys.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from antiphon.cli import kvoptions, kvplace
from antiphon.cli.kvplace import Place
from antiphon.cli.kvscan import scan_blocks
from antiphon.cli.options import whole
from antiphon.kv import codec, mackeys
from antiphon.kv.admin import open_admin
from antiphon.kv.keys import BlockKey
from antiphon.kv.redisstore import open_store
from antiphon.kv.store import BlockStore

HELP = "Check the MAC of a sample of the blocks in the store. Exit code 1 where one is bad."
EXAMPLE = "  antiphon kv verify --sample 1000"
_GET_TIMEOUT_S = 10.0
_SAMPLE = 200


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a sample. `bad`: keys by reason."""

    num_sound: int
    num_gone: int  # evicted between the scan and the look
    bad: dict[str, list[str]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The action's options."""
    kvplace.add_store_options(parser)
    kvplace.add_choice_options(parser)
    kvoptions.add_key_file_option(parser)
    parser.add_argument(
        "--sample", type=whole(1), default=_SAMPLE, metavar="N", help="how many blocks to look at, at most"
    )


def run(args: argparse.Namespace) -> int:
    """Print the verdict; 1 where a block is bad. Raises BadRequest, StoreFault."""
    place = Place(args, os.environ)
    url, match = place.needed_store(), place.match()
    keys = mackeys.load_or_create(kvoptions.key_file(args.kv_key_file, os.environ))
    with open_admin(url) as admin:
        chosen = sample(scan_blocks(admin, match), args.sample, random.SystemRandom())
    store = open_store(url)
    try:
        verdict = judge(store, chosen, keys)
    finally:
        store.close()
    if args.json:
        print(json.dumps(asdict(verdict)))
    else:
        print(f"{verdict.num_sound} of {len(chosen)} blocks are sound")
        if verdict.num_gone:
            print(f"{verdict.num_gone} were evicted before they were looked at")
        for reason, names in verdict.bad.items():
            print(f"{len(names)} bad ({reason}), among them {names[0]}")
    return 1 if verdict.bad else 0


def sample(batches: Iterable[Mapping[str, BlockKey]], size: int, dice: random.Random) -> dict[str, BlockKey]:
    """So many of the blocks, each as likely as the others, in memory for no more than that."""
    chosen: list[tuple[str, BlockKey]] = []
    seen = 0
    for blocks in batches:
        for item in blocks.items():
            seen += 1
            if len(chosen) < size:
                chosen.append(item)
            elif (place := dice.randrange(seen)) < size:
                chosen[place] = item
    return dict(chosen)


def judge(store: BlockStore, chosen: Mapping[str, BlockKey], keys: mackeys.MacKeys) -> Verdict:
    """Get each block and check it. Raises StoreFault."""
    num_sound = num_gone = 0
    bad: dict[str, list[str]] = {}
    for name, key in chosen.items():
        run = store.get_run([name], _GET_TIMEOUT_S)
        if run.fault is not None:
            raise run.fault
        (value,) = run.values
        if value is None:
            num_gone += 1
            continue
        try:
            codec.verify(key, value, keys)
            num_sound += 1
        except codec.BadValue as error:
            bad.setdefault(error.reason.value, []).append(name)
    return Verdict(num_sound, num_gone, bad)
