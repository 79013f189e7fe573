"""Events out of bytes: the same wherever the network cut them, and never more than the bound."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.router.upstreamsse import MAX_EVENT_BYTES, SseFault, SseParser

ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
DATA = st.binary(max_size=20).map(lambda data: data.replace(b"\r", b"").replace(b"\n", b"").strip(b" "))
NOISE = st.sampled_from([b"", b": ping", b"id: 5", b"event: x", b"retry: 1", b":"])


def parsed(*parts: bytes) -> list[bytes]:
    parser = SseParser()
    return [event for part in parts for event in parser.feed(part)] + parser.finish()


@given(
    events=st.lists(st.tuples(st.lists(DATA, min_size=1, max_size=3), NOISE), max_size=5),
    end=ENDS,
    cuts=st.lists(st.integers(0, 400), max_size=8),
    begin=st.sampled_from([b"", b"\xef\xbb\xbf"]),
)
def test_cuts_do_not_matter(
    events: list[tuple[list[bytes], bytes]], end: bytes, cuts: list[int], begin: bytes
) -> None:
    """Lines may end in three ways, comments and other fields may stand anywhere, packets may be any."""
    stream = begin
    for lines, noise in events:
        stream += end.join([*(b"data: " + line for line in lines), noise or b":", b"", b""])
    borders = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    parts = [stream[a:b] for a, b in pairwise(borders)]
    assert parsed(*parts) == [b"\n".join(lines) for lines, _ in events]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data:x\n\n", [b"x"]),
        (b"data:  x\n\n", [b" x"]),
        (b"data\n\n", [b""]),
        (b"data: x", [b"x"]),
        (b"data: x\n", [b"x"]),
        (b": only\n\n\n\n", []),
        (b'error: {"code":1}\n\n', [b'{"error":{"code":1}}']),
        (b"database: x\n\n", []),
        (b"data: a\r\rdata: b\n\n", [b"a", b"b"]),
    ],
)
def test_forms_of_an_event(stream: bytes, events: list[bytes]) -> None:
    """One space after the colon is form; the last event may lack its blank line."""
    assert parsed(stream) == events


@pytest.mark.parametrize("unit", [b"x" * 1000, b"data: " + b"x" * 994 + b"\n"])
def test_an_endless_event_is_a_fault_and_is_dropped(unit: bytes) -> None:
    """One line or many: past the bound nothing is kept."""
    parser = SseParser()
    with pytest.raises(SseFault):
        for _ in range(MAX_EVENT_BYTES // 500):
            parser.feed(unit)
    assert parser.finish() == []


def test_the_bound_is_for_one_event() -> None:
    """A long stream of small ones is none of its business."""
    parser = SseParser()
    event = b"data: " + b"x" * 1000 + b"\n\n"
    assert (
        sum(len(parser.feed(event)) for _ in range(2 * MAX_EVENT_BYTES // 1000))
        == 2 * MAX_EVENT_BYTES // 1000
    )
