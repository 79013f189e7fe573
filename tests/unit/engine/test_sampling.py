"""engine.sampling: what each rule of choosing does, one at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from antiphon.core.errors import BadRequest
from antiphon.core.generation import Sampling
from antiphon.engine.sampling import LOGPROB_FLOOR, BadLogits, Chosen, Sampler, choose_batch

VOCAB = 1000
NOTHING = -math.inf


def row(**logits: float) -> np.ndarray:
    """A row that is −inf except for the ids named t<ID>."""
    values = np.full(VOCAB, NOTHING, dtype=np.float32)
    for name, logit in logits.items():
        values[int(name[1:])] = logit
    return values


def sampler(choice: int = 0, **fields: object) -> Sampler:
    return Sampler(Sampling(**{"seed": 1, "max_tokens": 100, "temperature": 0.0} | fields), choice, VOCAB)


def drawn(logits: np.ndarray, num: int = 300, **fields: object) -> set[int]:
    """The distinct ids of many draws."""
    one = sampler(**fields)
    return {one.choose(logits, position).id for position in range(num)}


def noisy(seed: int, num: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, num).astype(np.float32)


def test_greedy_takes_the_highest_and_among_equals_the_lowest_id() -> None:
    """Temperature 0 is argmax with ties to the lowest id."""
    assert sampler().choose(row(t7=1.0, t30=2.5, t31=2.5), 0) == Chosen(30)


def test_a_tiny_temperature_is_greedy() -> None:
    """Temperatures float32 cannot divide by behave as 0 instead of breaking."""
    assert drawn(row(t3=0.0, t4=1.0), temperature=1e-300) == {4}


def test_only_tokens_above_minus_infinity_are_drawn() -> None:
    """Scripted models bar tokens with −inf; no draw ever lands on one."""
    assert drawn(row(t0=1.0, t500=1.0, t999=1.0), temperature=1.0) == {0, 500, 999}
    assert drawn(row(t500=-3e38), temperature=2.0, top_k=5, top_p=0.9, min_p=0.1) == {500}


def test_draws_follow_the_distribution() -> None:
    """Over many positions ids come as often as their probabilities say."""
    probabilities = np.array([0.5, 0.25, 0.2, 0.05])
    logits = row(**{f"t{300 * i}": math.log(p) for i, p in enumerate(probabilities)})
    one = sampler(temperature=1.0)
    ids = np.array([one.choose(logits, position).id for position in range(4000)])
    shares = np.array([(ids == 300 * i).mean() for i in range(4)])
    assert np.abs(shares - probabilities).max() < 0.03


def test_temperature_sharpens_and_flattens() -> None:
    """A low temperature leaves the best token alone, a high one lets all come up."""
    logits = row(t1=0.0, t2=2.0, t3=4.0)
    assert drawn(logits, temperature=0.05) == {3}
    assert drawn(logits, temperature=20.0) == {1, 2, 3}


def test_top_k_keeps_k_and_the_lowest_ids_among_equals() -> None:
    """At the edge of top_k equal logits are kept in order of id."""
    assert drawn(row(t9=1.0, t5=1.0, t7=1.0, t800=2.0), temperature=5.0, top_k=3) == {5, 7, 800}


def test_min_p_is_relative_to_the_best() -> None:
    """min_p 0.3 drops what is less than 0.3 times as likely as the best token."""
    logits = row(t1=math.log(1.0), t2=math.log(0.4), t3=math.log(0.2))
    assert drawn(logits, temperature=1.0, min_p=0.3) == {1, 2}


def test_top_p_keeps_the_token_that_crosses_the_share() -> None:
    """The nucleus reaches top_p: the token that crosses it is in, the next one out."""
    logits = row(t40=math.log(0.5), t30=math.log(0.3), t20=math.log(0.15), t10=math.log(0.05))
    assert drawn(logits, temperature=1.0, top_p=0.6) == {40, 30}
    assert drawn(logits, temperature=1.0, top_p=0.0) == {40}


def test_top_p_works_on_what_top_k_left() -> None:
    """top_p is a share of the mass that the filters before it kept."""
    logits = row(t1=math.log(0.4), t2=math.log(0.3), t3=math.log(0.3))
    assert drawn(logits, temperature=1.0, top_k=2, top_p=0.57) == {1}
    assert drawn(logits, temperature=1.0, top_k=2, top_p=0.58) == {1, 2}


def test_a_flat_distribution_is_cut_exactly() -> None:
    """Where the nucleus is larger than the first candidates the cut is still by share and id."""
    assert drawn(np.zeros(VOCAB, dtype=np.float32), num=8000, temperature=1.0, top_p=0.4995) == set(
        range(500)
    )


def test_logit_bias_bans_and_forces() -> None:
    """−100 keeps a token out, +100 brings it in, and several biases add up."""
    logits = row(t1=5.0, t2=4.0, t3=0.0)
    assert sampler(logit_bias=((1, -100.0),)).choose(logits, 0).id == 2
    assert drawn(logits, temperature=1.0, logit_bias=((3, 100.0),)) == {3}


def test_logit_bias_outside_the_vocabulary_is_refused() -> None:
    """An id the model does not have is the client's error, named, before any step."""
    with pytest.raises(BadRequest, match="token 1000; this model's ids are 0 to 999") as caught:
        sampler(logit_bias=((5, 1.0), (VOCAB, 1.0)))
    assert caught.value.param == "logit_bias"
    with pytest.raises(BadRequest, match="token -1"):
        sampler(logit_bias=((-1, 1.0),))


def test_penalties_count_accepted_tokens() -> None:
    """Presence counts a token once, frequency every time; a token never accepted pays nothing."""
    logits = row(t1=3.0, t2=2.0, t3=1.0)
    presence, frequency = sampler(presence_penalty=1.5), sampler(frequency_penalty=0.8)
    for one in (presence, frequency):
        one.accept(1)
    assert presence.choose(logits, 1).id == 2
    assert frequency.choose(logits, 1).id == 1
    frequency.accept(1)
    assert frequency.choose(logits, 2).id == 2


def test_min_tokens_bars_the_end_of_turn() -> None:
    """stop_ids cannot come before min_tokens and can from there on."""
    one = sampler(stop_ids=(8, 9), min_tokens=3)
    logits = row(t8=9.0, t9=8.0, t1=0.0)
    assert [one.choose(logits, position).id for position in range(5)] == [1, 1, 1, 8, 8]


def test_logprobs_are_the_models_own() -> None:
    """Logprobs come from the raw row: bias, penalties, bars and temperature do not show."""
    logits = noisy(3)
    plain = sampler(logprobs=5).choose(logits, 0).logprobs
    bent = sampler(logprobs=5, temperature=0.5, logit_bias=((4, 100.0),), stop_ids=(7,), min_tokens=9)
    assert plain is not None
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    order = np.argsort(-logits)[:5]
    assert [token for token, _ in plain.top] == order.tolist()
    assert [value for _, value in plain.top] == pytest.approx(exact[order], abs=1e-5)
    assert plain.chosen == pytest.approx(plain.top[0][1])
    chosen = bent.choose(logits, 0)
    assert chosen.id == 4
    assert chosen.logprobs is not None
    assert chosen.logprobs.top == plain.top
    assert chosen.logprobs.chosen == pytest.approx(exact[4], abs=1e-5)


def test_logprobs_of_zero_alternatives_name_the_chosen_token_only() -> None:
    """logprobs=0 is not the same as none asked for."""
    chosen = sampler(logprobs=0).choose(row(t1=0.0), 0)
    assert chosen.logprobs is not None
    assert chosen.logprobs.chosen == pytest.approx(0.0)
    assert chosen.logprobs.top == []


def test_logprobs_are_finite_and_leave_out_impossible_tokens() -> None:
    """An impossible token is never an alternative, and chosen by force it gets the floor."""
    forced = Sampler(
        Sampling(seed=1, max_tokens=9, temperature=0.0, logprobs=20, logit_bias=((2, 100.0),)), 0, VOCAB
    ).choose(row(t1=0.0, t2=-3e38), 0)
    assert forced.id == 1
    assert forced.logprobs is not None
    assert [value for _, value in forced.logprobs.top] == [pytest.approx(0.0), LOGPROB_FLOOR]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_row_is_refused(poison: float, temperature: float) -> None:
    """NaN and +inf anywhere in a row are an error, not a token."""
    logits = noisy(1)
    logits[777] = poison
    with pytest.raises(BadLogits, match="hold"):
        sampler(temperature=temperature, logit_bias=((777, -100.0),)).choose(logits, 0)


def test_a_row_with_nothing_left_is_refused() -> None:
    """All −inf, from the model or after the bars, is an error that says so."""
    with pytest.raises(BadLogits, match="barred"):
        sampler().choose(row(), 0)
    with pytest.raises(BadLogits, match="barred"):
        sampler(stop_ids=(5,), min_tokens=1, temperature=1.0).choose(row(t5=1.0), 0)


def test_a_bad_row_fails_alone_in_a_batch() -> None:
    """In a batch the fault stands in the bad row's place and the others are chosen."""
    logits = np.stack([row(t1=0.0), row(t2=math.nan), row(t3=0.0)])
    first, bad, last = choose_batch(logits, [sampler() for _ in range(3)], [0, 0, 0])
    assert (first, last) == (Chosen(1), Chosen(3))
    assert isinstance(bad, BadLogits)


def test_an_empty_batch_chooses_nothing() -> None:
    """A step in which nobody samples is legal."""
    assert choose_batch(np.empty((0, VOCAB), dtype=np.float32), [], []) == []


def test_choosing_leaves_the_row_and_the_sampler_alone() -> None:
    """`choose` may be asked twice: it writes neither into the runner's logits nor into itself."""
    logits = noisy(5)
    before = logits.copy()
    logits.flags.writeable = False
    one = sampler(temperature=1.0, presence_penalty=1.0, logit_bias=((1, 5.0),), top_k=50, top_p=0.9)
    one.accept(3)
    assert one.choose(logits, 4) == one.choose(logits, 4)
    assert np.array_equal(before, logits)


def test_choices_seeds_and_positions_draw_apart() -> None:
    """Each of choice, seed and position alone changes the draws; the same three repeat them."""
    logits = noisy(2)

    def ids(seed: int, choice: int, first: int) -> list[int]:
        one = sampler(choice, seed=seed, temperature=1.5)
        return [one.choose(logits, first + i).id for i in range(20)]

    base = ids(1, 0, 0)
    assert base == ids(1, 0, 0)
    assert base != ids(2, 0, 0)
    assert base != ids(1, 1, 0)
    assert base[1:] == ids(1, 0, 1)[:-1]
    assert base != ids(1, 0, 1)


def test_rounding_in_the_logits_does_not_move_the_draws() -> None:
    """Swapped near-ties, as another batch shape makes them, leave seeded answers as they were."""
    logits = noisy(6)
    shaken = logits + np.random.default_rng(7).uniform(-1e-6, 1e-6, VOCAB).astype(np.float32)
    assert not np.array_equal(np.argsort(logits), np.argsort(shaken)) or not np.array_equal(logits, shaken)
    one = sampler(temperature=1.0, top_p=0.95)
    assert [one.choose(logits, i).id for i in range(500)] == [one.choose(shaken, i).id for i in range(500)]
