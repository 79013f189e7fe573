"""Requests that kill workers: what is like them, and who did it."""

from __future__ import annotations

import msgspec
import pytest

from antiphon.core.clock import VirtualClock
from antiphon.core.generation import Constraint, Generation, Sampling
from antiphon.router import quarantine as quarantine_module
from antiphon.router.answer import Answer
from antiphon.router.quarantine import TTL_S, Quarantine, culprit

SAMPLING = Sampling(seed=1, max_tokens=8)
GENERATION = Generation(
    id="g", model="m", sampling=SAMPLING, token_ids=[1, 2, 3], num_prompt_tokens=3, scope=b"s", n=2
)


def changed(**fields: object) -> Generation:
    return msgspec.structs.replace(GENERATION, **fields)


@pytest.mark.parametrize(
    "same",
    [
        changed(id="other"),
        changed(sampling=msgspec.structs.replace(SAMPLING, seed=2, max_tokens=99, temperature=0.3)),
        changed(token_ids=[1, 2, 3, 4, 5]),  # answer tokens, of one that went on elsewhere
        changed(n=1, choice=0, timeout_s=3.0),
    ],
    ids=["id", "draws", "received", "shape"],
)
def test_the_same_request_again_is_known(same: Generation) -> None:
    """A client that tries again changes seed and id; what is computed is the same."""
    quarantine = Quarantine(VirtualClock())
    quarantine.add(GENERATION)
    assert quarantine.holds(same)


@pytest.mark.parametrize(
    "other",
    [
        changed(scope=b"t"),
        changed(model="n"),
        changed(token_ids=[1, 2, 4]),
        changed(token_ids=[1, 2], num_prompt_tokens=2),
        changed(constraint=Constraint("json", "{}")),
        changed(sampling=msgspec.structs.replace(SAMPLING, logit_bias=((1, 5.0),))),
    ],
    ids=["tenant", "model", "prompt", "prefix", "constraint", "bias"],
)
def test_other_requests_are_not(other: Generation) -> None:
    """Least of all another tenant's, though the prompt be the same."""
    quarantine = Quarantine(VirtualClock())
    quarantine.add(GENERATION)
    assert not quarantine.holds(other)


def test_it_ends_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fingerprint goes with its time, and the oldest where there are too many."""
    monkeypatch.setattr(quarantine_module, "MAX_FINGERPRINTS", 3)
    clock = VirtualClock()
    quarantine = Quarantine(clock)
    for number in range(5):
        quarantine.add(changed(token_ids=[number], num_prompt_tokens=1))
        clock.advance(1)
    assert [quarantine.holds(changed(token_ids=[i], num_prompt_tokens=1)) for i in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    clock.advance(TTL_S - 3)
    assert len(quarantine) == 2
    clock.advance(2)
    assert len(quarantine) == 0


def test_two_gateways_call_it_by_different_names() -> None:
    """A fingerprint says nothing to who does not have the key."""
    one, other = Quarantine(VirtualClock()), Quarantine(VirtualClock())
    one.add(GENERATION)
    other.add(GENERATION)
    assert one._until_s.keys() != other._until_s.keys()


def suspect(num_suspicions: int) -> Answer:
    answer = Answer(GENERATION)
    answer.num_suspicions = num_suspicions
    return answer


def test_who_did_it() -> None:
    """One that was there the time before too; two such ones may be innocent, so nobody is named."""
    first, again, too = suspect(0), suspect(1), suspect(1)
    assert culprit([]) is None
    assert culprit([first]) is None
    assert culprit([first, again]) is again
    assert culprit([first, again, too]) is None
