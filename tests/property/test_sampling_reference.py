"""engine.sampling against an obvious implementation: full sorts in float64, one rule after the other."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from antiphon.core.generation import Sampling
from antiphon.core.randomness import draw_key
from antiphon.engine.sampling import Chosen, Sampler, choose_batch

SLACK = 1e-5  # float32 against float64: edges nearer than this may fall either way


@st.composite
def rows(draw: st.DrawFn, sizes: st.SearchStrategy[int] | None = None) -> np.ndarray:
    """Logits with many ties (a coarse grid), some −inf, of peaked or flat shape."""
    size = draw(sizes if sizes is not None else st.sampled_from([1, 2, 17, 255, 256, 257, 700, 3000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = np.round(rng.normal(0, draw(st.sampled_from([0.0, 0.5, 3.0, 8.0])), size) * 4) / 4
    barred = rng.random(size) < draw(st.sampled_from([0.0, 0.5, 0.99]))
    barred[rng.integers(size)] = False
    logits[barred] = -np.inf
    return logits.astype(np.float32)


def samplings(size: int) -> st.SearchStrategy[Sampling]:
    """Any mix of the rules, for a vocabulary of `size`."""
    ids = st.integers(0, size - 1)
    return st.builds(
        Sampling,
        seed=st.integers(-(2**63), 2**63 - 1),
        max_tokens=st.just(10),
        logit_bias=st.lists(st.tuples(ids, st.sampled_from([-100.0, -1.5, 2.0])), max_size=3).map(tuple),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.75, -1.0]),
        presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
        temperature=st.sampled_from([0.0, 0.25, 1.0, 1.0, 2.0]),
        top_k=st.sampled_from([0, 0, 1, 5, 40, 300]),
        min_p=st.sampled_from([0.0, 0.0, 0.021, 0.3]),
        top_p=st.sampled_from([1.0, 0.95, 0.5, 0.013, 0.0]),
        logprobs=st.sampled_from([None, 0, 3, 20]),
        stop_ids=st.lists(ids, max_size=1).map(tuple),
        min_tokens=st.sampled_from([0, 2]),
    )


def adjusted(row: np.ndarray, sampling: Sampling, answer: list[int], position: int) -> np.ndarray:
    """Logits after bias, penalties and bars."""
    scores = row.astype(np.float64)
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    for token in set(answer):
        scores[token] -= sampling.presence_penalty + sampling.frequency_penalty * answer.count(token)
    if position < sampling.min_tokens:
        scores[list(sampling.stop_ids)] = -np.inf
    return scores


def distribution(scores: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Probabilities [vocab] after temperature, top_k, min_p and top_p; assumes no edge is within SLACK."""
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] > -np.inf]
    order = order[: sampling.top_k or None]
    weights = np.exp((scores[order] - scores[order[0]]) / sampling.temperature)
    assume(np.abs(weights - sampling.min_p).min() > SLACK)
    order, weights = order[weights >= sampling.min_p], weights[weights >= sampling.min_p]
    if sampling.top_p < 1.0:
        reached = np.cumsum(weights) / weights.sum()
        assume(np.abs(reached - sampling.top_p).min() > SLACK)
        num = int((reached < sampling.top_p).sum()) + 1
        order, weights = order[:num], weights[:num]
    probabilities = np.zeros(scores.size)
    probabilities[order] = weights / weights.sum()
    return probabilities


def exponential(key: int, token: int) -> float:
    """The draw of one id, in whole numbers."""
    word = ((token + 1) * 0x9E3779B97F4A7C15 + key) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    word ^= word >> 31
    return -math.log(((word >> 11) + 1) / 2**53)


def race_of(probabilities: np.ndarray, key: int) -> tuple[int, float]:
    """Who wins, and how many times longer whoever is second takes (1: anybody may win)."""
    times = {i: exponential(key, i) / p for i, p in enumerate(probabilities.tolist()) if p > 0.0}
    weights = probabilities / probabilities.max()
    weak = {i: times[i] for i in times if weights[i] < 1e-3}
    if np.abs(weights - 1e-3).min() < SLACK:
        return -1, 1.0
    runners = {i: t for i, t in times.items() if i not in weak}
    if weak:
        runners[-1] = exponential(key, -1) / probabilities[list(weak)].sum()
    order = sorted(runners, key=runners.__getitem__)
    if order[0] == -1:
        runners, order = weak, sorted(weak, key=weak.__getitem__)
    return order[0], math.inf if len(order) == 1 else runners[order[1]] / max(runners[order[0]], 1e-300)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), row=rows(), position=st.integers(0, 4))
def test_choice_agrees_with_the_reference(data: st.DataObject, row: np.ndarray, position: int) -> None:
    """Greedy ids are equal; a drawn id is the one that wins the reference's race."""
    sampling = data.draw(samplings(row.size))
    answer = data.draw(st.lists(st.integers(0, row.size - 1), max_size=6))
    sampler = Sampler(sampling, 3, row.size)
    for token in answer:
        sampler.accept(token)
    scores = adjusted(row, sampling, answer, position)
    assume(scores.max() > -np.inf)
    chosen = sampler.choose(row, position).id
    if sampling.temperature == 0.0:
        assert chosen == int(scores.argmax())
        return
    probabilities = distribution(scores, sampling)
    assert probabilities[chosen] > 0.0
    winner, lead = race_of(probabilities, draw_key(sampling.seed, 3, position))
    assert chosen == winner or lead < 1 + SLACK


@settings(max_examples=100, deadline=None)
@given(row=rows(), num=st.sampled_from([1, 5, 20]))
def test_logprobs_agree_with_the_reference(row: np.ndarray, num: int) -> None:
    """The best ids are those of a stable full sort, their values those of a float64 log-softmax."""
    sampling = Sampling(seed=0, max_tokens=1, temperature=0.0, logprobs=num)
    logprobs = Sampler(sampling, 0, row.size).choose(row, 0).logprobs
    assert logprobs is not None
    finite = row[row > -np.inf].astype(np.float64)
    exact = row - (finite.max() + np.log(np.exp(finite - finite.max()).sum()))
    order = [token for token in np.argsort(-row, kind="stable").tolist() if row[token] > -np.inf][:num]
    assert [token for token, _ in logprobs.top] == order
    assert np.allclose([value for _, value in logprobs.top], exact[order], atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.sampled_from([5, 300, 1000]))
def test_a_batch_chooses_what_each_row_alone_would(data: st.DataObject, size: int) -> None:
    """Neither the others in the batch nor the place in it change a choice."""
    members = data.draw(
        st.lists(st.tuples(rows(st.just(size)), samplings(size), st.integers(2, 9)), min_size=1, max_size=6)
    )
    samplers = [Sampler(sampling, choice, size) for choice, (_, sampling, _) in enumerate(members)]
    positions = [position for _, _, position in members]
    logits = np.stack([row for row, _, _ in members])
    alone: list[Chosen] = [
        sampler.choose(row, position)
        for sampler, row, position in zip(samplers, logits, positions, strict=True)
    ]
    assert choose_batch(logits, samplers, positions) == alone
    backwards = choose_batch(logits[::-1], samplers[::-1], positions[::-1])
    assert backwards[::-1] == alone
