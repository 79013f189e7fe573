"""`antiphon kv verify` over a real store that the codec filled."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from antiphon.cli.kvverify import judge, sample
from antiphon.cli.main import main
from antiphon.core.clock import WallClock
from antiphon.kv import mackeys
from antiphon.kv.codec import BlockCodec
from antiphon.kv.keys import BlockKey, parse_block_key
from antiphon.kv.memorystore import MemoryStore
from support.kvvalues import NAMESPACE, OTHER_NAMESPACE, make_block
from support.redisserver import RedisServer, redis_server


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The MAC keys of this machine."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = tmp_path / "keys"
    mackeys.load_or_create(file)
    return file


def _values(key_file: Path, namespace: bytes = NAMESPACE, num_blocks: int = 5) -> dict[str, bytes]:
    """Sound values by key."""
    codec = BlockCodec(namespace, mackeys.load(key_file))
    blocks = [make_block(range(first, first + 4), namespace=namespace) for first in range(num_blocks)]
    return {codec.key(block): codec.encode(block, bytes(100)) for block in blocks}


def _verify(server: RedisServer, key_file: Path, *arguments: str) -> int:
    return main(["kv", "verify", "--redis", server.url, "--kv-key-file", str(key_file), *arguments])


def test_sound_blocks_pass(key_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them, also those signed with the key before the last rotation."""
    with redis_server(unix=True) as server, server.client() as client:
        client.mset(_values(key_file))
        mackeys.rotate(key_file)
        client.mset(_values(key_file, OTHER_NAMESPACE))
        assert _verify(server, key_file) == 0
        assert capsys.readouterr().out == "10 of 10 blocks are sound\n"
        assert _verify(server, key_file, "--sample", "3", "--json") == 0
        assert json.loads(capsys.readouterr().out) == {"num_sound": 3, "num_gone": 0, "bad": {}}


def test_bad_blocks_are_counted_by_reason_and_left(
    key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flipped bit, a swapped value, another machine's key: exit code 1, and nothing was deleted."""
    with redis_server(unix=True) as server, server.client() as client:
        values = _values(key_file)
        flipped, swapped, *_ = names = sorted(values)
        values[flipped] = values[flipped][:150] + bytes([values[flipped][150] ^ 1]) + values[flipped][151:]
        values[swapped] = values[names[2]]
        client.mset(values)
        assert _verify(server, key_file, "--json") == 1
        verdict = json.loads(capsys.readouterr().out)
        assert verdict == {"num_sound": 3, "num_gone": 0, "bad": {"mac": [flipped], "hash": [swapped]}}
        assert client.dbsize() == 5
        key_file.unlink()
        assert _verify(server, key_file) == 1
        assert "4 bad (key), among them antiphon:kv:" in capsys.readouterr().out


def test_only_chosen_blocks_are_looked_at(key_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A namespace's blocks are judged without the others'."""
    with redis_server(unix=True) as server, server.client() as client:
        client.mset(_values(key_file) | _values(key_file, OTHER_NAMESPACE, 2))
        assert _verify(server, key_file, "--namespace", OTHER_NAMESPACE.hex()) == 0
        assert capsys.readouterr().out == "2 of 2 blocks are sound\n"


def test_block_that_was_evicted_is_not_bad(key_file: Path) -> None:
    """What went between the scan and the look is counted apart."""
    values = _values(key_file)
    store = MemoryStore(WallClock(), 2**20)
    chosen: dict[str, BlockKey] = {}
    for number, (name, value) in enumerate(values.items()):
        block = parse_block_key(name)
        assert block is not None
        chosen[name] = block
        if number:
            store.put(name, value, 60_000, 1.0)
    verdict = judge(store, chosen, mackeys.load(key_file))
    assert (verdict.num_sound, verdict.num_gone, verdict.bad) == (4, 1, {})


def test_every_block_is_as_likely_to_be_chosen() -> None:
    """Wherever in the walk a block comes: 3 of 12 in four batches, many times."""
    batches = [
        {str(4 * batch + place): BlockKey(NAMESPACE, b"tag1", bytes(32)) for place in range(4)}
        for batch in range(3)
    ]
    dice = random.Random(7)
    counts = Counter(name for _ in range(4000) for name in sample(batches, 3, dice))
    assert sum(counts.values()) == 3 * 4000
    assert all(abs(counts[str(number)] - 1000) < 150 for number in range(12))
    assert len(sample(batches, 100, dice)) == 12
    assert sample([], 3, dice) == {}
