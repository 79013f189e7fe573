"""bench/kv_levers.py and its servers: one thing differs between two sides, and every fetch is whole."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import cast

import pytest
from bench.errors import BenchFault
from bench.kv_levers import (
    DEFAULT,
    LEVERS,
    PAYLOAD_BYTES,
    SETUPS,
    Bench,
    Lever,
    Settings,
    Setup,
    Side,
    Unproven,
    chain,
    figures,
)
from bench.lever_servers import cluster, make_certificates, one_server, slot_ranges

from antiphon.core.clock import WallClock
from antiphon.engine.kvtype import KvType
from antiphon.kv.cache import KvCache
from antiphon.kv.memorystore import MemoryStore
from antiphon.kv.redisstore import open_store
from support.kvchains import BLOCK_BYTES, CODEC, make_cache, with_payloads
from support.kvchains import chain as small_chain
from support.kvvalues import KEYS, NAMESPACE
from support.redisserver import find_redis


def timed(*seconds: float) -> Side:
    """A side whose fetches took so long."""
    return Side(cast(KvCache, None), (), 10, seconds=list(seconds), cpu_s=list(seconds))


@pytest.mark.parametrize("lever", LEVERS, ids=lambda lever: lever.name)
def test_a_lever_changes_one_thing(lever: Lever) -> None:
    """Its two sides are set up alike but for one field."""
    ours, base = (dataclasses.asdict(SETUPS[name]) for name in (lever.side, lever.base))
    assert sum(ours[name] != base[name] for name in ours) == 1


def test_the_default_side_is_what_serve_does() -> None:
    """A unix socket, as many connections as the store opens by itself, f16, every value proven."""
    sockets = open_store.__defaults__
    assert sockets is not None
    assert SETUPS[DEFAULT] == Setup(way="unix", num_sockets=sockets[0], kv_type="f16", is_proven=True)


def test_payloads_hold_the_same_numbers() -> None:
    """Two bytes a number in f16, blocks of 32 numbers in the others."""
    counts = {KvType(name).num_values(num_bytes) for name, num_bytes in PAYLOAD_BYTES.items()}
    assert counts == {32 * 11_520}


def test_chains_are_whole_and_no_two_alike() -> None:
    """Indices from 0, full blocks, hashes of their own."""
    settings = Settings.quick()
    blocks = chain(settings, NAMESPACE) + chain(settings, NAMESPACE)
    assert [block.index for block in blocks] == 2 * list(range(settings.num_blocks))
    assert {len(block.token_ids) for block in blocks} == {settings.block_tokens}
    assert len({block.hash for block in blocks}) == len(blocks)


def test_a_codec_that_believes_everything_keeps_the_length() -> None:
    """What it hands out weighs as much as what was encoded, also where the value was forged."""
    (block, payload), *_ = with_payloads(small_chain(1))
    value = bytearray(CODEC.encode(block, payload))
    value[-1] ^= 1
    assert len(Unproven(NAMESPACE, KEYS).decode(block, bytes(value))) == len(payload)


def test_ratios_are_medians_over_the_rounds() -> None:
    """Round by round, not median by median; the MAC's share is what is spared without it."""
    sides = {name: timed(1.0, 2.0, 4.0) for name in SETUPS}
    sides["TLS"] = timed(3.0, 2.0, 8.0)
    sides["without MAC"] = timed(0.75, 1.5, 4.0)
    found = {f.name: f.value for f in figures(sides)}
    assert found.pop("tls") == 2.0
    assert found.pop("mac_share") == 0.25
    assert set(found.values()) == {1.0}
    assert len(found) == len(LEVERS) - 1


def test_a_fetch_is_whole_or_a_fault() -> None:
    """Times are noted of fetches that brought everything; what is missing ends the bench."""
    store = MemoryStore(WallClock(), 2**20)
    blocks = small_chain(4)
    for block, payload in with_payloads(blocks[:3]):
        store.put(CODEC.key(block), CODEC.encode(block, payload), 60_000, 1.0)
    cache = make_cache(store)
    try:
        side = Side(cache, blocks[:3], 3 * BLOCK_BYTES)
        side.fetch()
        side.rest()
        assert len(side.seconds) == len(side.cpu_s) == 1
        with pytest.raises(BenchFault, match="3 of 4 blocks: fetched"):
            Side(cache, blocks, 4 * BLOCK_BYTES).fetch()
    finally:
        cache.close()


def test_slots_are_dealt_without_a_gap() -> None:
    """Each slot of a cluster has one master."""
    slots = [slot for first, last in slot_ranges(3) for slot in range(first, last + 1)]
    assert slots == list(range(16384))


async def test_all_sides_fetch_from_real_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Socket, port, TLS and cluster; every round counts but the first."""
    find_redis()
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make certificates")
    monkeypatch.setattr("bench.kv_levers.PAYLOAD_BYTES", dict.fromkeys(PAYLOAD_BYTES, 4096))
    async with one_server() as ways, cluster(3) as masters:
        urls = {"unix": ways.unix, "TCP": ways.tcp, "TLS": ways.tls, "cluster": masters}
        bench = Bench(Settings(num_rounds=2, num_blocks=6), urls)
        try:
            bench.fill()
            bench.measure()
        finally:
            bench.close()
    assert {name: len(side.seconds) for name, side in bench.sides.items()} == dict.fromkeys(SETUPS, 2)
    assert {name for name, side in bench.sides.items() if side.num_near} == {"host tier"}


def test_a_machine_without_openssl_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No binary is one message."""
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(BenchFault, match="apt-get install openssl"):
        make_certificates(tmp_path)
