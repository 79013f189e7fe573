"""Messages on the WebSocket between a gateway and a worker, MessagePack-coded.

One frame is one message. Down: `Submit`, `Abort`. Up: `Hello` once, then per engine step ONE
`Frame` with the outputs of all this gateway's sequences, or an empty one as a heartbeat.
A message that does not decode closes the connection; nothing is ever guessed.
"""

from __future__ import annotations

import msgspec

from antiphon.core.generation import Generation, Load, StepOutput, WorkerInfo

PROTOCOL = 2
MAX_FRAME_BYTES = 16 * 2**20
HEARTBEAT_S = 1.0


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    generation: Generation


class Abort(msgspec.Struct, frozen=True, tag="abort", omit_defaults=True):
    """End a generation, or only one choice of it (a stop string was found in its text)."""

    generation: str
    choice: int | None = None


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    protocol: int
    info: WorkerInfo


class Frame(msgspec.Struct, frozen=True, tag="frame"):
    outputs: list[StepOutput]
    load: Load


Down = Submit | Abort
Up = Hello | Frame

encoder = msgspec.msgpack.Encoder()
decode_down = msgspec.msgpack.Decoder(Down).decode
decode_up = msgspec.msgpack.Decoder(Up).decode
