"""`antiphon kv stats`: how much of whose KV lies in the store, and how often workers found theirs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import msgspec

from antiphon.cli import kvplace
from antiphon.cli.kvpages import WorkerSilent
from antiphon.cli.kvplace import Place
from antiphon.cli.kvscan import scan_blocks
from antiphon.core.errors import BadRequest
from antiphon.kv.admin import open_admin
from antiphon.kv.keys import BlockKey, match_blocks
from antiphon.worker.kvinfo import KvInfo

HELP = "Count the blocks in the store by namespace and tenant, and show how often workers found theirs."
EXAMPLE = "  antiphon kv stats"
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Group:
    """The blocks of a tenant in a namespace. `tenant`: its name, or the tag of one unknown here."""

    namespace: str
    tenant: str
    num_blocks: int
    size_bytes: int


def add_options(parser: argparse.ArgumentParser) -> None:
    """The action's options."""
    kvplace.add_store_options(parser)
    kvplace.add_worker_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print both tables; a worker that does not answer is left out. Raises BadRequest, StoreFault."""
    place = Place(args, os.environ)
    store = place.store()
    groups = None if store is None else grouped(_sizes(store), place.tenants().name_of)
    infos = []
    for worker in place.workers():
        try:
            infos.append(worker.info())
        except WorkerSilent as silence:
            print(f"antiphon kv stats: {silence}", file=sys.stderr)
    if groups is None and not infos:
        raise BadRequest("there is neither a store nor a worker that answers")
    if args.json:
        sums = None if groups is None else [asdict(group) for group in groups]
        print(json.dumps({"store": sums, "workers": msgspec.to_builtins(infos)}))
    else:
        print("\n".join([*_store_lines(groups), *_worker_lines(infos)]))
    return 0


def grouped(blocks: Mapping[BlockKey, int], name_of: Callable[[bytes], str]) -> list[Group]:
    """Blocks and their sizes summed up, largest first."""
    sums: dict[tuple[bytes, bytes], tuple[int, int]] = {}
    for key, size_bytes in blocks.items():
        group = (key.namespace, key.scope_tag)
        num_blocks, total = sums.get(group, (0, 0))
        sums[group] = (num_blocks + 1, total + size_bytes)
    groups = [
        Group(namespace.hex(), name_of(tag), num_blocks, total)
        for (namespace, tag), (num_blocks, total) in sums.items()
    ]
    return sorted(groups, key=lambda group: (-group.size_bytes, group.namespace, group.tenant))


def _sizes(url: str) -> dict[BlockKey, int]:
    """All blocks with their sizes: about 300 bytes of ours a block."""
    sizes = {}
    with open_admin(url) as admin:
        for blocks in scan_blocks(admin, match_blocks()):
            for block, size_bytes in zip(blocks.values(), admin.sizes(list(blocks)), strict=True):
                if size_bytes is not None:  # else it is gone meanwhile
                    sizes[block] = size_bytes
    return sizes


def _store_lines(groups: Sequence[Group] | None) -> Iterator[str]:
    if groups is None:
        yield "no store"
        return
    width = max([len("tenant"), *(len(group.tenant) for group in groups)])
    yield f"{'namespace':<18}{'tenant':<{width}}{'blocks':>10}{'size':>12}"
    for group in groups:
        size = _size(group.size_bytes)
        yield f"{group.namespace:<18}{group.tenant:<{width}}{group.num_blocks:>10}{size:>12}"
    num_blocks, size = sum(g.num_blocks for g in groups), _size(sum(g.size_bytes for g in groups))
    yield f"{'all':<{18 + width}}{num_blocks:>10}{size:>12}"


def _worker_lines(infos: Sequence[KvInfo]) -> Iterator[str]:
    """Shares are of the prompts' full blocks."""
    for info in infos:
        stats = info.stats
        tiers = (stats.num_local, stats.num_host, stats.num_store, stats.num_computed)
        total = sum(tiers)
        yield f"\n{info.worker}: {info.model}, {info.block_tokens} tokens a block, namespace {info.namespace}"
        for name, number in zip(("engine", "host", "redis", "computed"), tiers, strict=True):
            share = f"{number / total:.0%}" if total else "-"
            yield f"  {name:<10}{number:>10}{share:>6}"
        yield f"  host tier: {stats.host_blocks} blocks, {_size(stats.host_bytes)}"
        if (store := stats.store) is not None:
            bad = sum(store.bad_values.values())
            faults = sum(store.read_faults.values()) + sum(store.write_faults.values())
            yield (
                f"  redis: {store.num_stored} stored, {store.num_dropped} dropped, {bad} bad, "
                f"{faults} faults; breakers: reads {store.read_breaker}, writes {store.write_breaker}"
            )
        yield f"  saved about {max(0.0, stats.saved_s):.1f} s of computing"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.1f} MiB" if num_bytes >= _MIB else f"{num_bytes / 1024:.1f} KiB"
