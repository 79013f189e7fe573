"""10⁵ ways to spoil stored values: none is accepted, each has a reason.

Whoever can write to the store can do all of this without a MAC key, and bugs on the way can do much of it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from antiphon.core.kvblock import KvBlock
from antiphon.kv.codec import OVERHEAD_BYTES, BadValue, BadValueReason, BlockCodec, Header
from antiphon.kv.mackeys import MacKey
from support.kvvalues import (
    CURRENT,
    HEADER_BYTES,
    KEYS,
    NAMESPACE,
    OTHER_NAMESPACE,
    OTHER_SCOPE,
    RETIRED,
    SCOPE,
    UNKNOWN,
    forge,
    header_of,
    make_block,
)

MUTATIONS = 100_000
CODECS = {namespace: BlockCodec(namespace, KEYS) for namespace in (NAMESPACE, OTHER_NAMESPACE)}
NUMBERS = {
    "version": 16,
    "codec": 16,
    "rank": 32,
    "num_tokens": 32,
    "first_position": 32,
    "payload_bytes": 64,
}
SIZES = {"magic": 8, "namespace": 8, "scope_tag": 4, "hash": 32, "token_digest": 32, "key_id": 4}


@dataclass(frozen=True)
class Place:
    """What a value was written for, and what a reader believes it gets."""

    namespace: bytes
    block: KvBlock
    rank: int


def places() -> list[Place]:
    """Blocks that share as much as blocks can: tokens, place, history, tenant, namespace, all but one."""
    found = []
    for namespace in CODECS:
        for scope in (SCOPE, OTHER_SCOPE, SCOPE[:16] + b"narrowed-by-salt"):
            for ids, index, before in [
                (range(16), 2, b""),
                (range(16), 2, b"x"),
                (range(16), 3, b"y"),
                (range(1, 17), 2, b""),
                (range(8), 4, b""),
            ]:
                block = make_block(ids, index, scope, namespace, before)
                found += [Place(namespace, block, rank) for rank in (0, 1)]
    return found


PLACES = places()
STORED = {
    place: CODECS[place.namespace].encode(place.block, bytes([at]) * (at % 70), place.rank)
    for at, place in enumerate(PLACES)
}

Spoil = Callable[[random.Random, Place], bytes]


def flip(rng: random.Random, place: Place) -> bytes:
    """One to three bits. Two may not undo each other."""
    value = bytearray(STORED[place])
    for bit in rng.sample(range(8 * len(value)), rng.randint(1, 3)):
        value[bit // 8] ^= 1 << bit % 8
    return bytes(value)


def overwrite(rng: random.Random, place: Place) -> bytes:
    """A run of other bytes: zeros, ones or noise."""
    value = bytearray(STORED[place])
    begin = rng.randrange(len(value))
    end = rng.randint(begin + 1, min(len(value), begin + 40))
    value[begin:end] = rng.choice([bytes(end - begin), b"\xff" * (end - begin), rng.randbytes(end - begin)])
    return bytes(value)


def truncate(rng: random.Random, place: Place) -> bytes:
    """The beginning or the end is missing."""
    value = STORED[place]
    cut = rng.randint(1, len(value))
    return value[:-cut] if rng.random() < 0.7 else value[cut:]


def extend(rng: random.Random, place: Place) -> bytes:
    """Something before, after or in the middle, once with the length told."""
    value = STORED[place]
    more = rng.choice([b"\0", b"\n", rng.randbytes(rng.randint(1, 50)), value])
    at = rng.choice([0, HEADER_BYTES, len(value) - 32, len(value)])
    header = header_of(value)
    if at and rng.random() < 0.5:
        longer = header._replace(payload_bytes=header.payload_bytes + len(more))
        value = forge(longer, b"")[:HEADER_BYTES] + value[HEADER_BYTES:]
    return value[:at] + more + value[at:]


def swap(rng: random.Random, place: Place) -> bytes:
    """A good value of another block, rank, namespace, tenant or conversation."""
    return STORED[rng.choice([other for other in PLACES if other is not place])]


def splice(rng: random.Random, place: Place) -> bytes:
    """Header, payload and MAC of two good values."""
    mine, other = STORED[place], STORED[rng.choice(PLACES)]
    pieces = [(value[:HEADER_BYTES], value[HEADER_BYTES:-32], value[-32:]) for value in (mine, other)]
    return b"".join(pieces[rng.random() < 0.5][part] for part in range(3))


def lie(rng: random.Random, place: Place) -> bytes:
    """Other fields in the header, the old MAC kept."""
    value = STORED[place]
    return forge(_lying(rng, header_of(value)), b"")[:HEADER_BYTES] + value[HEADER_BYTES:]


def forge_with_a_strange_key(rng: random.Random, place: Place) -> bytes:
    """A whole new value, perfect but for the key: a retired one or one of the forger's own."""
    key = rng.choice([RETIRED, UNKNOWN, MacKey.of(rng.randbytes(32))])
    value = STORED[place]
    header = header_of(value)._replace(key_id=rng.choice([key.id, CURRENT.id, KEYS.previous.id]))
    if rng.random() < 0.5:
        header = _lying(rng, header)
    return forge(header, value[HEADER_BYTES:-32], key)


def noise(rng: random.Random, place: Place) -> bytes:
    """Nothing of ours at all, or our first bytes and then nothing of ours."""
    kept = STORED[place][: rng.choice([0, 8, 12, HEADER_BYTES])]
    return kept + rng.randbytes(rng.randint(0, 2 * OVERHEAD_BYTES))


SPOILS: tuple[Spoil, ...] = (
    flip,
    overwrite,
    truncate,
    extend,
    swap,
    splice,
    lie,
    forge_with_a_strange_key,
    noise,
)


def _lying(rng: random.Random, header: Header) -> Header:
    changes: dict[str, object] = {}
    for name in rng.sample([*NUMBERS, *SIZES], rng.randint(1, 2)):
        if name in SIZES:
            donor = getattr(header_of(STORED[rng.choice(PLACES)]), name)
            changes[name] = rng.choice([donor, bytes(SIZES[name]), rng.randbytes(SIZES[name])])
        else:
            most = 2 ** NUMBERS[name] - 1
            near = getattr(header, name) + rng.choice([-1, 1])
            changes[name] = rng.choice([0, most, most // 2 + 1, rng.randint(0, most), near % (most + 1)])
    return header._replace(**changes)


def test_no_spoiled_value_is_accepted() -> None:
    """Whatever was done, the reader gets a reason and no byte; only the untouched value is taken."""
    seed = random.getrandbits(64)
    rng = random.Random(seed)
    reasons: Counter[BadValueReason] = Counter()
    done: Counter[str] = Counter()
    while done.total() < MUTATIONS:
        place = rng.choice(PLACES)
        spoil = rng.choice(SPOILS)
        value = spoil(rng, place)
        if value == STORED[place]:
            continue
        try:
            CODECS[place.namespace].decode(place.block, value, place.rank)
        except BadValue as bad:
            reasons[bad.reason] += 1
            done[spoil.__name__] += 1
        else:
            raise AssertionError(f"seed {seed}: {spoil.__name__} was accepted for {place}: {value.hex()}")
    assert set(reasons) == set(BadValueReason), "a reason that never shows is a check that never works"
    assert min(done[spoil.__name__] for spoil in SPOILS) > MUTATIONS // 20


def test_the_untouched_values_are_accepted() -> None:
    """Else the test above would prove nothing."""
    for at, place in enumerate(PLACES):
        found = CODECS[place.namespace].decode(place.block, STORED[place], place.rank)
        assert found == bytes([at]) * (at % 70)
