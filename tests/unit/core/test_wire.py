"""The messages of the gateway–worker socket: what goes in comes out, the rest is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.generation import (
    CachedTokens,
    Generation,
    KvReport,
    Load,
    Priority,
    Sampling,
    StepOutput,
    Terminal,
    TokenLogprobs,
    WorkerInfo,
)
from antiphon.core.kvblock import Tier
from antiphon.core.wire import (
    PROTOCOL,
    Abort,
    BlockChange,
    Blocks,
    Down,
    Forget,
    Frame,
    Hello,
    Resync,
    Submit,
    Up,
    decode_down,
    decode_up,
    encoder,
)

GENERATION = Generation(
    id="chatcmpl-1",
    model="m",
    sampling=Sampling(seed=-5, max_tokens=10, logit_bias=((3, -1.5),), logprobs=2, stop_ids=(1, 2)),
    token_ids=[1, 2, 300000],
    num_prompt_tokens=2,
    num_public_tokens=1,
    scope=b"\x00" * 32,
    priority=Priority.BATCH,
    timeout_s=1.5,
    n=2,
)
INFO = WorkerInfo(
    worker="w",
    model="m",
    revision="r",
    namespace="n",
    engine="e",
    version="v",
    context_tokens=1,
    block_tokens=2,
    num_blocks=3,
    max_sequences=4,
)
OUTPUT = StepOutput(
    "chatcmpl-1",
    1,
    7,
    [5, 6],
    Terminal.STOP,
    [TokenLogprobs(-0.5, [(5, -0.5), (9, -2.0)])],
    CachedTokens(64),
    None,
    0.25,
    KvReport(14, 6, 22, 8, 16_000_000, 0.009, 0.41, "fetched"),
)


@pytest.mark.parametrize(
    "message",
    [
        Submit(GENERATION),
        Abort("chatcmpl-1"),
        Abort("chatcmpl-1", 1),
        Resync(),
        Forget([bytes(16), b"16 bytes of one."]),
    ],
)
def test_messages_to_the_worker_survive_the_wire(message: Down) -> None:
    """Encoded and decoded they are equal."""
    assert decode_down(encoder.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Hello(PROTOCOL, INFO, 2**63),
        Hello(PROTOCOL, INFO, 1, takes_forget=True),
        Blocks(2**63, 7, [BlockChange(Tier.HOST, True, b"8 bytes.")]),
        Blocks(1, 0, [], part=0, is_last=True),
        Frame([OUTPUT], Load(1, 2, 3, 4, 5, 6, 7, True)),
        Frame([], Load(0, 0, 0, 0, 0, 0, 0)),
    ],
)
def test_messages_to_the_gateway_survive_the_wire(message: Up) -> None:
    """Encoded and decoded they are equal."""
    assert decode_up(encoder.encode(message)) == message


@given(data=st.binary(max_size=200))
def test_other_bytes_are_refused_and_nothing_else_happens(data: bytes) -> None:
    """Any bytes either decode to a message or raise the one error a link handles."""
    for decode in (decode_down, decode_up):
        try:
            message = decode(data)
        except msgspec.DecodeError:
            continue
        assert isinstance(message, Down | Up)


@given(cut=st.integers(0, 400), flip=st.integers(0, 255), at=st.integers(0, 400))
def test_damaged_messages_never_crash_the_decoder(cut: int, flip: int, at: int) -> None:
    """A real message, cut and changed anywhere."""
    data = bytearray(encoder.encode(Submit(GENERATION)))
    data[at % len(data)] ^= flip
    try:
        decode_down(bytes(data[: max(1, len(data) - cut)]))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return


def test_a_token_costs_few_bytes_on_the_wire() -> None:
    """One sequence's part of a decode frame stays small: it is sent for every token."""
    one = Frame([StepOutput("chatcmpl-" + "x" * 24, 0, 100, [4000])], Load(0, 0, 0, 0, 0, 0, 0))
    two = Frame([one.outputs[0], one.outputs[0]], one.load)
    assert len(encoder.encode(two)) - len(encoder.encode(one)) <= 50


@pytest.mark.parametrize("change", [[1, True, b"seven.."], [3, True, b""], [1, True], [1, True, "8 bytes."]])
def test_a_change_that_makes_no_sense_does_not_decode(change: list[object]) -> None:
    """Half a key, a tier that does not exist, something missing, text for bytes."""
    data = msgspec.msgpack.encode({"type": "blocks", "life": 1, "number": 1, "changes": [change]})
    with pytest.raises(msgspec.DecodeError):
        decode_up(data)


def test_the_bytes_of_block_news_are_as_they_were() -> None:
    """Workers and gateways of one protocol number understand each other, whatever is rebuilt."""
    blocks = Blocks(5, 7, [BlockChange(Tier.STORE, False, b"8 bytes.")])
    assert encoder.encode(blocks) == (
        b"\x84\xa4type\xa6blocks\xa4life\x05\xa6number\x07\xa7changes\x91\x93\x02\xc2\xc4\x088 bytes."
    )
    assert encoder.encode(Resync()) == b"\x81\xa4type\xa6resync"


def test_a_worker_that_does_not_say_so_takes_no_forget() -> None:
    """Those built before it was there would close the link for it."""
    old = {"type": "hello", "protocol": PROTOCOL, "info": msgspec.to_builtins(INFO), "life": 3}
    assert decode_up(msgspec.msgpack.encode(old)) == Hello(PROTOCOL, INFO, 3, takes_forget=False)


@pytest.mark.parametrize("tenant", [b"", bytes(15), bytes(17), bytes(32), "16 letters here."])
def test_half_a_tenant_does_not_decode(tenant: object) -> None:
    """A shorter one would be that of many."""
    with pytest.raises(msgspec.DecodeError):
        decode_down(msgspec.msgpack.encode({"type": "forget", "tenants": [tenant]}))
