"""Messages on the WebSocket between a gateway and a worker, MessagePack-coded.

One frame is one message. Down: `Submit`, `Abort`, `Resync`, `Forget`. Up: `Hello` once, then per engine step
ONE `Frame` with the outputs of all this gateway's sequences, or an empty one as a heartbeat; between
frames `Blocks`, which say what the worker holds. A message that does not decode closes the connection;
nothing is ever guessed.

Block hashes travel as keys, their first `KEY_BYTES` bytes: they are hints to a router, which needs no
proof. A router knows keys as integers; only equality means anything.
"""

from __future__ import annotations

import array
from collections.abc import Iterable

import msgspec

from antiphon.core.blockhash import BlockHash
from antiphon.core.generation import Generation, Load, StepOutput, WorkerInfo
from antiphon.core.kvblock import Tier
from antiphon.core.scope import TENANT_BYTES

PROTOCOL = 2
MAX_FRAME_BYTES = 16 * 2**20
HEARTBEAT_S = 0.2  # of a worker with nothing to say: its silence is soon noticed
KEY_BYTES = 8


def pack_keys(hashes: Iterable[BlockHash]) -> bytes:
    """The keys of these hashes, joined."""
    return b"".join([block_hash[:KEY_BYTES] for block_hash in hashes])


def unpack_keys(keys: bytes) -> list[int]:
    """Joined keys as integers."""
    return array.array("Q", keys).tolist()


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    generation: Generation


class Abort(msgspec.Struct, frozen=True, tag="abort", omit_defaults=True):
    """End a generation, or only one choice of it (a stop string was found in its text)."""

    generation: str
    choice: int | None = None


class Resync(msgspec.Struct, frozen=True, tag="resync"):
    """Changes were missed: say all that you hold anew."""


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """These tenants were erased: drop what is held of them and not in use. Not for a worker that does not
    take it: a message that it does not know would close the connection.
    """

    tenants: list[bytes]  # the `TENANT_BYTES` that all scopes of each begin with

    def __post_init__(self) -> None:
        if any(len(tenant) != TENANT_BYTES for tenant in self.tenants):
            raise ValueError(f"what scopes of a tenant begin with has {TENANT_BYTES} bytes")


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """`life` is drawn anew at each start of a worker; numbers of `Blocks` count within it."""

    protocol: int
    info: WorkerInfo
    life: int = 0
    takes_forget: bool = False


class Frame(msgspec.Struct, frozen=True, tag="frame"):
    outputs: list[StepOutput]
    load: Load


class BlockChange(msgspec.Struct, frozen=True, array_like=True):
    """Blocks that a tier has now, or has no longer. `keys`: `KEY_BYTES` of each hash, joined."""

    tier: Tier
    is_stored: bool
    keys: bytes

    def __post_init__(self) -> None:
        if len(self.keys) % KEY_BYTES:
            raise ValueError(f"{len(self.keys)} bytes are not whole keys of {KEY_BYTES}")


class Blocks(msgspec.Struct, frozen=True, tag="blocks", omit_defaults=True):
    """News of the blocks that a worker holds, a hint to routers.

    Without `part`: the consecutive changes up to `number`, which count from 1 within one life of the
    worker. With it: part 0, 1, … of a snapshot of all that is held after change `number` (for the store:
    of what went there lately, nobody knows what it still has); its changes are all `is_stored`.
    """

    life: int
    number: int
    changes: list[BlockChange]
    part: int | None = None
    is_last: bool = False  # no part follows


Down = Submit | Abort | Resync | Forget
Up = Hello | Frame | Blocks

encoder = msgspec.msgpack.Encoder()
decode_down = msgspec.msgpack.Decoder(Down).decode
decode_up = msgspec.msgpack.Decoder(Up).decode
