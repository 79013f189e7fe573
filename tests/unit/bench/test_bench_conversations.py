"""bench/conversations.py: how a chat grows, what is read of its answers, where two answers part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import msgspec
import pytest
from bench.client import Answer, Target
from bench.conversations import NEAR_TIE, Chat, Growth, Reply, Scored, ask, difference, read
from bench.errors import BenchFault

GROWTH = Growth(first=300, later=(20, 60), answer=3)


def event(*tokens: tuple[str, float, dict[str, float]]) -> bytes:
    """The data of one chat event with these tokens, their log probabilities and alternatives."""
    content = [
        {
            "token": token,
            "logprob": logprob,
            "top_logprobs": [{"token": t, "logprob": p} for t, p in top.items()],
        }
        for token, logprob, top in tokens
    ]
    delta = {"content": "".join(token for token, _, _ in tokens)}
    return msgspec.json.encode({"choices": [{"index": 0, "delta": delta, "logprobs": {"content": content}}]})


EVENTS = [
    b'{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}',
    event(("a", -0.1, {"a": -0.1, "b": -2.5}), ("b", -0.2, {"b": -0.2})),
    event(("c", -0.3, {})),
    b'{"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}',
    b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}',
]


def scored(text: str, logprob: float = -0.1, **top: float) -> Scored:
    """One token with its alternatives."""
    return Scored(text, logprob, top)


def test_a_chat_is_the_same_for_one_seed_and_grows_as_asked() -> None:
    """The first turn has its length, later ones lie within theirs, and other seeds say other things."""
    chat, again, other = (Chat.draw(seed, 6, GROWTH) for seed in ("a", "a", "b"))
    assert chat == again
    assert chat.user_turns[0] != other.user_turns[0]
    lengths = [len(turn.split()) for turn in chat.user_turns]
    assert lengths[0] == 300
    assert all(20 <= length <= 60 for length in lengths[1:])


def test_a_request_holds_what_was_said_and_the_next_turn() -> None:
    """Turns and answers alternate; the answer has an exact length and its events are kept."""
    chat = Chat(["one", "two", "three"], 3, ["eins"])
    request = chat.request("m")
    body = msgspec.json.decode(request.body)
    assert [(m["role"], m["content"]) for m in body["messages"]] == [
        ("user", "one"),
        ("assistant", "eins"),
        ("user", "two"),
    ]
    assert (body["min_tokens"], body["max_tokens"], request.num_tokens) == (3, 3, 3)
    assert (body["temperature"], body["logprobs"], request.keeps_events) == (0, True, True)


async def test_a_turn_is_asked_and_read(
    playback: Callable[[Sequence[bytes]], AbstractAsyncContextManager[Target]],
) -> None:
    """Text and tokens come out of the stream, however many tokens an event holds."""
    body = b"".join(b"data: " + data + b"\n\n" for data in EVENTS) + b"data: [DONE]\n\n"
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with playback([head + body]) as target:
        reply = await ask(target, Chat(["one"], 3).request("m"))
        with pytest.raises(BenchFault, match="3 tokens came, not 4"):
            await ask(target, Chat(["one"], 4).request("m"))
    assert reply.text == "abc"
    assert [t.token for t in reply.tokens] == ["a", "b", "c"]
    assert reply.tokens[0] == Scored("a", -0.1, {"a": -0.1, "b": -2.5})
    assert reply.num_computable == 7 + 3 - 1


def test_events_that_were_not_kept_make_an_empty_reply() -> None:
    """Nothing is read where nothing was kept."""
    assert read(Answer(0.0)) == Reply(Answer(0.0), "", [])


def test_equal_answers_do_not_differ() -> None:
    """The same tokens with other log probabilities are the same answer."""
    assert difference([scored("a"), scored("b")], [scored("a", -0.7), scored("b")]) is None


@pytest.mark.parametrize(
    ("one", "other", "gap"),
    [
        (scored("b", -0.70, b=-0.70, c=-0.71), scored("c", -0.69, b=-0.72, c=-0.69), 0.03),
        (scored("b", -0.1, b=-0.1, c=-4.1), scored("c", -0.69, b=-0.70), 4.0),
        (scored("b", -0.1, b=-0.1), scored("c", -0.69, b=-0.70), math.inf),
    ],
)
def test_the_gap_is_the_larger_of_both_sides(one: Scored, other: Scored, gap: float) -> None:
    """A tie has to be one for both; a rival that is not among the best is none."""
    found = difference([scored("a"), one], [scored("a"), other])
    assert found is not None
    assert found == difference([scored("a"), other], [scored("a"), one])
    assert (found.position, found.gap) == (1, pytest.approx(gap))
    assert found.is_near_tie is (gap < NEAR_TIE)


def test_an_answer_that_ends_early_differs_beyond_a_tie() -> None:
    """A missing token is no near-tie."""
    found = difference([scored("a"), scored("b")], [scored("a")])
    assert found is not None
    assert not found.is_near_tie
