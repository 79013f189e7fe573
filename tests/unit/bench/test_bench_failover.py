"""What `bench failover` makes of streams: what they said, their pauses, where two of them part."""

from __future__ import annotations

import json

import pytest
from bench.client import Answer
from bench.failover import Fault, Outcome
from bench.failover_streams import Said, Spec, margin_at, pauses, read


def event(index: int, text: str = "", finish: str | None = None, scores: object = None) -> bytes:
    choice = {"index": index, "delta": {"content": text}, "logprobs": scores, "finish_reason": finish}
    return json.dumps({"choices": [choice]}).encode()


def answer(*events: tuple[float, bytes]) -> Answer:
    made = Answer(0.0, num_tokens=len(events))
    made.events = [data for _, data in events]
    made.event_s = [at_s for at_s, _ in events]
    return made


def scored(token: str, best: float, second: float) -> object:
    tops = [{"token": token, "logprob": best}, {"token": "?", "logprob": second}]
    return {"content": [{"token": token, "logprob": best, "top_logprobs": tops}]}


def test_choices_are_told_apart() -> None:
    """Texts, times and ends by choice; time makes no difference between two streams."""
    one = read(
        answer((1.0, event(0, "a")), (1.1, event(1, "x")), (1.2, event(0, "b")), (1.3, event(0, "", "stop")))
    )
    assert one.texts == {0: "ab", 1: "x"}
    assert one.finishes == {0: "stop"}
    assert one.token_s[0] == [1.0, 1.2]
    later = read(
        answer((2.0, event(0, "a")), (2.1, event(1, "x")), (2.2, event(0, "b")), (2.3, event(0, "", "stop")))
    )
    assert one == later


@pytest.mark.parametrize(
    "other",
    [
        Said({0: "ab"}, num_tokens=2),
        Said({0: "abb"}, num_tokens=3),
        Said({0: "abc"}, num_tokens=4),
        Said({0: "abc"}, finishes={0: "stop"}, num_tokens=3),
        Said({0: "abc"}, logprobs={0: b"x"}, num_tokens=3),
    ],
)
def test_a_change_is_seen(other: Said) -> None:
    """A token lost, changed or billed twice, another end, another probability."""
    calm = Said({0: "abc"}, num_tokens=3)
    outcome = Outcome((), [(Answer(0.0), calm, calm), (Answer(0.0), other, calm)])
    assert (outcome.num_lost, outcome.num_changed) == (0, 1)


def test_a_stream_that_failed_is_lost_not_changed() -> None:
    """It counts once."""
    outcome = Outcome((), [(Answer(0.0, fault="error event"), Said(), Said({0: "a"}))])
    assert (outcome.num_lost, outcome.num_changed) == (1, 0)


def test_gaps_count_from_the_fault_and_of_what_moved() -> None:
    """Not from the token before it; and a token that was on its way does not end the gap."""
    moved = Said(token_s={0: [0.9, 1.0, 1.05, 1.6, 1.7]})
    steady = Said(token_s={0: [0.9, 1.0, 1.1, 1.15, 1.2], 1: [2.0, 9.0]})
    assert pauses([moved, steady], 1.02) == pytest.approx([0.58, 0.08])
    outcome = Outcome([Fault(True, 1.02, 1)], [(Answer(0.0), moved, moved), (Answer(0.0), steady, steady)])
    assert outcome.gaps(is_kill=True) == pytest.approx([0.58])
    assert outcome.gaps(is_kill=False) == []


def test_a_tie_is_measured_where_texts_part() -> None:
    """Between the two best tokens of the undisturbed text at that place."""
    calm = read(
        answer(
            (0, event(0, "a", None, scored("a", -0.1, -3.0))),
            (0, event(0, "b", None, scored("b", -0.7, -0.75))),
        )
    )
    same = read(
        answer(
            (0, event(0, "a", None, scored("a", -0.1, -3.0))),
            (0, event(0, "b", None, scored("b", -0.7, -0.75))),
        )
    )
    other = read(
        answer(
            (0, event(0, "a", None, scored("a", -0.1, -3.0))),
            (0, event(0, "c", None, scored("c", -0.7, -0.7))),
        )
    )
    assert margin_at(same, calm) is None
    assert margin_at(other, calm) == pytest.approx(0.05)
    assert margin_at(Said({0: "a"}), calm) == float("inf")


def test_requests_are_the_same_each_time_and_all_kinds_are_there() -> None:
    """Only the label differs, which keeps their KV apart."""
    specs = [Spec.of(stream, 0, 10) for stream in range(4)]
    bodies = [json.loads(spec.request("m", "a").body) for spec in specs]
    again = [json.loads(spec.request("m", "b").body) for spec in specs]
    assert [{**body, "cache_salt": "b"} for body in bodies] == again
    assert [{"frequency_penalty", "logprobs", "n", "stop"} & body.keys() for body in bodies] == [
        {"frequency_penalty"},
        {"logprobs"},
        {"n", "frequency_penalty"},
        {"stop"},
    ]
