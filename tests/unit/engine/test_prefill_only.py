"""A generation that is there for its prompt's KV only, and blocks that are due before a prompt's end.

Two engines on scripted runners stand for a prefill worker and a decode worker; the text of the second
is a function of the KV that the first one handed out.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.clock import VirtualClock
from antiphon.core.errors import BadRequest
from antiphon.core.generation import Generation, KvReport, Sampling, StepOutput, Terminal
from antiphon.core.kvblock import KvBlock, Tier
from antiphon.engine.engine import Engine, EngineSettings
from antiphon.engine.runner import RunnerFault
from antiphon.engine.scripted import SCRIPTS, ScriptedRunner, ScriptedSettings

Make = Callable[..., Generation]
BLOCK = 16
PROMPT = [i % 200 for i in range(150)]  # nine full blocks and some
FETCHED = KvReport(decision="fetched")


def engine_with(
    *, is_early: bool = False, checkpoint_blocks: int | None = 2, num_blocks: int = 100
) -> Engine:
    runner = ScriptedRunner(SCRIPTS["babble"], ScriptedSettings(context_tokens=256, max_sequences=4))
    settings = EngineSettings(
        num_blocks=num_blocks,
        namespace=b"n",
        checkpoint_blocks=checkpoint_blocks,
        offers_early=is_early,
        token_budget=32,
    )
    return Engine(runner, settings, VirtualClock())


def prefill_only(generation: Generation) -> Generation:
    return msgspec.structs.replace(generation, is_prefill_only=True)


def run(engine: Engine) -> tuple[list[StepOutput], list[list[KvBlock]]]:
    """All outputs, and what became due with each step."""
    outputs: list[StepOutput] = []
    due: list[list[KvBlock]] = []
    while engine.has_work:
        outputs += engine.step()
        due.append(engine.exportable())
    engine.check()
    return outputs, due


def ids(outputs: list[StepOutput]) -> list[int]:
    return [i for output in outputs for i in output.ids]


def indices(due: list[list[KvBlock]]) -> list[list[int]]:
    return [[block.index for block in blocks] for blocks in due]


def test_it_ends_without_a_token_and_its_blocks_are_due_on_the_way(make_generation: Make) -> None:
    """Two blocks a step here, each due when it is full; the tail behind the last one is not computed."""
    engine = engine_with()
    engine.add(prefill_only(make_generation("g~p", PROMPT)))
    outputs, due = run(engine)
    assert outputs == [
        StepOutput("g~p", 0, 0, [], Terminal.LENGTH, cached=outputs[0].cached, queued_s=0.0),
    ]
    assert indices(due) == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    assert engine.counters.prefill_tokens == 9 * BLOCK
    assert engine.counters.decode_tokens == 0


def test_who_takes_its_blocks_over_answers_as_if_it_had_computed_them(make_generation: Make) -> None:
    """The decode worker computes the tail only, and says what a cold one says."""
    cold = engine_with()
    cold.add(make_generation("g", PROMPT))
    expected = ids(run(cold)[0])
    prefill, decode = engine_with(), engine_with()
    prefill.add(prefill_only(make_generation("g~p", PROMPT)))
    _, due = run(prefill)
    blocks = [block for part in due for block in part]
    decode.add(make_generation("g", PROMPT), hold_s=1.0)
    decode.supply("g", [(b, payload, Tier.STORE) for b, payload in prefill.export(blocks)], FETCHED)
    outputs, _ = run(decode)
    assert ids(outputs) == expected
    assert decode.counters.prefill_tokens == len(PROMPT) - 9 * BLOCK


@pytest.mark.parametrize(("is_early", "first"), [(False, []), (True, [0, 1])])
def test_a_prompts_blocks_are_due_early_where_the_worker_does_so(
    make_generation: Make, is_early: bool, first: list[int]
) -> None:
    """A prefill worker offers any prompt's blocks on the way; the others at its end."""
    engine = engine_with(is_early=is_early)
    engine.add(make_generation("g", PROMPT, max_tokens=1))
    _, due = run(engine)
    assert indices(due)[0] == first
    assert sorted(index for part in indices(due) for index in part) == list(range(9))


def test_without_tiers_nothing_is_due(make_generation: Make) -> None:
    """It is computed for the engine's own cache, and ends all the same."""
    engine = engine_with(checkpoint_blocks=None, is_early=True)
    engine.add(prefill_only(make_generation("g~p", PROMPT)))
    outputs, due = run(engine)
    assert [output.finish for output in outputs] == [Terminal.LENGTH]
    assert not any(due)


def test_a_prompt_below_a_block_ends_at_once(make_generation: Make) -> None:
    """Nobody could take anything over: nothing is computed. Exactly one block and no tail is no better."""
    for number in (1, BLOCK):
        engine = engine_with()
        engine.add(prefill_only(make_generation("g~p", PROMPT[:number])), hold_s=1.0)
        assert not engine.is_held("g~p")
        outputs, due = run(engine)
        assert [(o.choice, o.finish) for o in outputs] == [(0, Terminal.LENGTH)]
        assert not any(due)
        assert engine.counters.steps == 0


def test_blocks_that_are_here_are_due_again(make_generation: Make) -> None:
    """The store may have lost what was offered long ago; one block is computed, all nine are offered."""
    engine = engine_with()
    engine.add(prefill_only(make_generation("a~p", PROMPT)))
    run(engine)
    engine.add(prefill_only(make_generation("b~p", PROMPT)))
    _, due = run(engine)
    assert sorted(index for part in indices(due) for index in part) == list(range(9))
    assert engine.counters.prefill_tokens == (9 + 1) * BLOCK


def test_blocks_that_were_just_brought_are_not_due(make_generation: Make) -> None:
    """They come from where the others will look."""
    other, engine = engine_with(), engine_with()
    other.add(prefill_only(make_generation("x~p", PROMPT)))
    _, due = run(other)
    saved = other.export([block for part in due for block in part])
    engine.add(prefill_only(make_generation("g~p", PROMPT)), hold_s=1.0)
    engine.supply("g~p", [(block, payload, Tier.STORE) for block, payload in saved[:4]], FETCHED)
    _, due = run(engine)
    assert sorted(index for part in indices(due) for index in part) == [4, 5, 6, 7, 8]


def test_it_has_one_choice(make_generation: Make) -> None:
    """Several would compute the same blocks."""
    with pytest.raises(BadRequest, match="n must be 1"):
        engine_with().add(prefill_only(make_generation("g~p", PROMPT, n=2)))


def test_it_can_be_aborted(make_generation: Make) -> None:
    """In the middle; what was computed by then is offered, and nothing stays in use."""
    engine = engine_with()
    engine.add(prefill_only(make_generation("g~p", PROMPT)))
    engine.step()
    engine.abort("g~p")
    outputs, due = run(engine)
    assert [(output.position, output.finish) for output in outputs] == [(0, Terminal.ABORTED)]
    assert indices(due) == [[0, 1]]


def test_it_runs_among_others(make_generation: Make) -> None:
    """Answers beside it are those of an engine without it, choice by choice."""
    alone, engine = engine_with(), engine_with()
    for made in (alone, engine):
        made.add(make_generation("a", [7, 8, 9], n=2))
    engine.add(prefill_only(make_generation("g~p", PROMPT)))
    expected, _ = run(alone)
    outputs, _ = run(engine)
    for choice in (0, 1):
        mine = [o for o in outputs if (o.generation, o.choice) == ("a", choice)]
        assert ids(mine) == ids([o for o in expected if o.choice == choice])


def test_a_failed_step_ends_it(make_generation: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As any other one: with the error."""
    engine = engine_with()

    def fail(chunks: object) -> None:
        raise RunnerFault("planted")

    monkeypatch.setattr(engine.runner, "run", fail)
    engine.add(prefill_only(make_generation("g~p", PROMPT)))
    outputs, _ = run(engine)
    assert [(output.finish, output.error) for output in outputs] == [(Terminal.ERROR, "planted")]


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    public=st.integers(0, 200),
    num_blocks=st.integers(20, 60),
)
def test_whatever_runs_all_usable_blocks_become_due(lengths: list[int], public: int, num_blocks: int) -> None:
    """Prompts of any length, public prefixes, an engine short of blocks: each ends once, none is left out."""
    engine = engine_with(num_blocks=num_blocks)
    wanted: set[tuple[int, ...]] = set()
    for number, length in enumerate(lengths):
        tokens = [(number + i) % 200 for i in range(length)]
        engine.add(
            Generation(
                id=f"{number}~p",
                model="m",
                sampling=Sampling(seed=1, max_tokens=1),
                token_ids=tokens,
                num_prompt_tokens=length,
                num_public_tokens=min(public, length),
                is_prefill_only=True,
            )
        )
        wanted |= {tuple(tokens[i : i + BLOCK]) for i in range(0, (length - 1) // BLOCK * BLOCK, BLOCK)}
    outputs, due = run(engine)
    assert sorted(o.generation for o in outputs) == sorted(f"{n}~p" for n in range(len(lengths)))
    assert all(o.finish is Terminal.LENGTH and not o.ids for o in outputs)
    assert {block.token_ids for part in due for block in part} == wanted
