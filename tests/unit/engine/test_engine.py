"""Engine on the scripted runner: one end per choice, whatever happens on the way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest

from antiphon.core.clock import VirtualClock
from antiphon.core.errors import BadRequest, Busy, ContextTooLong
from antiphon.core.generation import Constraint, Generation, StepOutput, Terminal
from antiphon.engine.engine import Engine, EngineSettings
from antiphon.engine.runner import Chunk, Logits
from antiphon.engine.scripted import (
    END_ID,
    SCRIPTS,
    START_ID,
    Memory,
    ScriptedRunner,
    ScriptedSettings,
    babble,
)

Make = Callable[..., Generation]
Answers = dict[tuple[str, int], list[StepOutput]]


def engine_with(
    script: str = "babble", *, num_blocks: int = 200, clock: VirtualClock | None = None, **runner: object
) -> Engine:
    settings = ScriptedSettings(**{"context_tokens": 128, "max_sequences": 8} | runner)
    return Engine(
        ScriptedRunner(SCRIPTS[script], settings),
        EngineSettings(num_blocks=num_blocks, token_budget=32, max_waiting=16),
        clock or VirtualClock(),
    )


def run(engine: Engine, limit: int = 500) -> Answers:
    """Step until nothing is left; outputs by choice."""
    answers: Answers = defaultdict(list)
    for _ in range(limit):
        if not engine.has_work:
            engine.check()
            return answers
        for output in engine.step():
            answers[output.generation, output.choice].append(output)
    raise AssertionError("the engine does not come to an end")


def ids(outputs: list[StepOutput]) -> list[int]:
    return [i for output in outputs for i in output.ids]


def test_an_answer_is_gapless_and_ends_once(make_generation: Make) -> None:
    """Positions count up from 0, one finish, at the length asked for."""
    engine = engine_with()
    engine.add(make_generation("a", [1, 2, 3], max_tokens=5))
    outputs = run(engine)["a", 0]
    assert [o.position for o in outputs] == [0, 1, 2, 3, 4]
    assert [o.finish for o in outputs] == [None] * 4 + [Terminal.LENGTH]


def test_the_stop_id_ends_the_answer_and_is_not_part_of_it(make_generation: Make) -> None:
    """Echo says the user's bytes and then ends its turn."""
    prompt = [START_ID, *b"user\nhi", END_ID, 10, START_ID, *b"assistant\n"]
    engine = engine_with("echo")
    engine.add(make_generation("a", prompt, stop_ids=(END_ID,)))
    outputs = run(engine)["a", 0]
    assert bytes(ids(outputs)) == b"hi"
    assert outputs[-1].finish is Terminal.STOP
    assert outputs[-1].ids == []


def test_min_tokens_bars_the_stop_id(make_generation: Make) -> None:
    """Where only the stop id has a chance and is barred, the choice ends in a clear error."""
    prompt = [START_ID, *b"user\nhi", END_ID, 10, START_ID, *b"assistant\n"]
    engine = engine_with("echo")
    engine.add(make_generation("a", prompt, stop_ids=(END_ID,), min_tokens=3))
    outputs = run(engine)["a", 0]
    assert bytes(ids(outputs)) == b"hi"
    assert outputs[-1].finish is Terminal.ERROR
    assert "barred" in (outputs[-1].error or "")


def test_the_context_bounds_the_answer(make_generation: Make) -> None:
    """An answer that fills the context ends with length."""
    engine = engine_with()
    engine.add(make_generation("a", list(range(100)), max_tokens=1000))
    outputs = run(engine)["a", 0]
    assert len(ids(outputs)) == 28
    assert outputs[-1].finish is Terminal.LENGTH


def test_blocks_bound_the_answer_where_they_hold_less_than_the_context(make_generation: Make) -> None:
    """A lone answer that no preemption could make room for ends with length, not in a circle."""
    engine = engine_with(num_blocks=4)
    engine.add(make_generation("a", list(range(30)), max_tokens=1000))
    outputs = run(engine)["a", 0]
    assert len(ids(outputs)) == 4 * 16 - 30
    assert outputs[-1].finish is Terminal.LENGTH


def test_choices_of_one_prompt_share_its_blocks_and_differ_in_their_draws(make_generation: Make) -> None:
    """n=4 computes the prompt's full blocks once; each choice draws for itself."""
    engine = engine_with("noise")
    engine.add(make_generation("a", list(range(50)), n=4, temperature=1.0))
    answers = run(engine)
    assert len({tuple(ids(answers["a", c])) for c in range(4)}) == 4
    assert engine.counters.prefill_tokens == 50 + 3 * 2
    assert [answers["a", c][0].cached.total for c in range(4)] == [0, 48, 48, 48]


def test_same_seed_same_draws_whatever_else_runs(make_generation: Make) -> None:
    """An answer alone and the same answer in a crowd are equal."""
    alone = engine_with("noise")
    alone.add(make_generation("a", [5, 6, 7], temperature=1.0, seed=9))
    crowd = engine_with("noise")
    for i in range(6):
        crowd.add(make_generation(f"x{i}", [i, 6, 7, 8], temperature=1.0, seed=i))
    crowd.add(make_generation("a", [5, 6, 7], temperature=1.0, seed=9))
    assert ids(run(alone)["a", 0]) == ids(run(crowd)["a", 0])


def test_an_answer_goes_on_from_tokens_received_elsewhere(make_generation: Make) -> None:
    """Failover: prompt + half an answer continues exactly as the whole answer did, penalties included."""
    options = {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.7, "max_tokens": 20}
    whole = engine_with("noise")
    whole.add(make_generation("a", [5, 6, 7], **options))
    expected = ids(run(whole)["a", 0])
    rest = engine_with("noise")
    rest.add(make_generation("a", [5, 6, 7], received=expected[:9], **options))
    outputs = run(rest)["a", 0]
    assert outputs[0].position == 9
    assert ids(outputs) == expected[9:]


def test_abort_ends_waiting_and_running_alike(make_generation: Make) -> None:
    """Both leave no block behind and end in one aborted output."""
    engine = engine_with(max_sequences=1)
    engine.add(make_generation("runs", [1, 2, 3], max_tokens=50))
    engine.add(make_generation("waits", [4, 5, 6]))
    engine.step()
    engine.abort("runs")
    engine.abort("waits")
    engine.abort("unknown")
    answers = run(engine)
    assert answers["runs", 0][-1].finish is Terminal.ABORTED
    assert answers["waits", 0][-1].finish is Terminal.ABORTED
    assert engine.load().used_blocks == 0


def test_one_choice_can_be_aborted(make_generation: Make) -> None:
    """A stop string found in one choice leaves the others running."""
    engine = engine_with()
    engine.add(make_generation("a", [1, 2, 3], n=2, max_tokens=4))
    engine.step()
    engine.abort("a", 0)
    answers = run(engine)
    assert answers["a", 0][-1].finish is Terminal.ABORTED
    assert answers["a", 1][-1].finish is Terminal.LENGTH


def test_a_deadline_ends_an_answer(make_generation: Make) -> None:
    """Time that ran out is an end of its own kind, also for one that never ran."""
    clock = VirtualClock()
    engine = engine_with(clock=clock, max_sequences=1)
    engine.add(make_generation("a", [1, 2, 3], max_tokens=50, timeout_s=5.0))
    engine.add(make_generation("b", [1, 2, 3], timeout_s=5.0))
    engine.step()
    clock.advance(6.0)
    answers = run(engine)
    assert {answers[name, 0][-1].finish for name in "ab"} == {Terminal.DEADLINE}


def test_what_ends_while_it_waits_is_never_computed(make_generation: Make) -> None:
    """Neither one whose time ran out nor one whose client left costs a token: not of its prompt either."""
    clock = VirtualClock()
    engine = engine_with(clock=clock, max_sequences=1)
    engine.add(make_generation("a", [1, 2, 3], max_tokens=4))
    engine.add(make_generation("late", list(range(40, 60)), timeout_s=5.0))
    engine.add(make_generation("left", list(range(70, 90))))
    engine.step()
    engine.abort("left")
    clock.advance(6.0)
    answers = run(engine)
    assert answers["late", 0][-1].finish is Terminal.DEADLINE
    assert answers["left", 0][-1].finish is Terminal.ABORTED
    assert engine.counters.prefill_tokens == 3
    assert engine.counters.decode_tokens == 4


def test_a_failed_step_fails_its_sequences_and_no_others(make_generation: Make) -> None:
    """The engine goes on: what waits is served by the next step."""

    class FailsOnce(ScriptedRunner):
        def run(self, chunks: list[Chunk]) -> Logits:
            rows = super().run(chunks)
            if any(chunk.tokens[0] == 66 for chunk in chunks):
                self.close(next(c.sequence for c in chunks if c.tokens[0] == 66))
                from antiphon.engine.runner import RunnerFault

                raise RunnerFault("planted")
            return rows

    runner = FailsOnce(babble, ScriptedSettings(max_sequences=1))
    engine = Engine(runner, EngineSettings(num_blocks=50), VirtualClock())
    engine.add(make_generation("bad", [66, 1]))
    engine.add(make_generation("good", [1, 2]))
    answers = run(engine)
    assert (answers["bad", 0][-1].finish, answers["bad", 0][-1].error) == (Terminal.ERROR, "planted")
    assert answers["good", 0][-1].finish is Terminal.LENGTH
    assert engine.counters.failed_steps == 1


def test_output_that_is_no_number_fails_that_sequence_alone(make_generation: Make) -> None:
    """NaN logits end one choice in an error; its neighbour in the same step goes on."""

    def script(memory: Memory, row: Logits) -> None:
        babble(memory, row)
        if memory.tokens[0] == 66:
            row[:] = np.nan

    engine = Engine(
        ScriptedRunner(script, ScriptedSettings()),
        EngineSettings(num_blocks=50, token_budget=64),
        VirtualClock(),
    )
    engine.add(make_generation("bad", [66, 1]))
    engine.add(make_generation("good", [1, 2]))
    answers = run(engine)
    assert answers["bad", 0][-1].finish is Terminal.ERROR
    assert answers["good", 0][-1].finish is Terminal.LENGTH


def test_preempted_answers_are_the_same_as_undisturbed_ones(make_generation: Make) -> None:
    """Too few blocks cost time, not tokens."""
    prompts = {f"g{i}": [i * 10 + j for j in range(30)] for i in range(4)}
    roomy, tight = engine_with(), engine_with(num_blocks=11)
    for engine in (roomy, tight):
        for name, prompt in prompts.items():
            engine.add(make_generation(name, prompt, max_tokens=40))
    expected, answers = run(roomy), run(tight)
    assert tight.counters.preemptions > 0
    assert {k: ids(v) for k, v in answers.items()} == {k: ids(v) for k, v in expected.items()}


def test_tenants_share_no_blocks(make_generation: Make) -> None:
    """The same prompt of another tenant is computed anew."""
    engine = engine_with()
    for name, tenant in (("a", "one"), ("b", "two"), ("c", "one")):
        engine.add(make_generation(name, list(range(64)), tenant=tenant, max_tokens=1))
    answers = run(engine)
    assert [answers[name, 0][0].cached.total for name in "abc"] == [0, 0, 48]


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"prompt": []}, BadRequest, "no tokens"),
        ({"prompt": list(range(128))}, ContextTooLong, "maximum context length is 128"),
        ({"prompt": [1, 258]}, BadRequest, "outside the vocabulary"),
        ({"prompt": [1, -1]}, BadRequest, "outside the vocabulary"),
        ({"prompt": [1], "n": 17}, Busy, "full"),
        ({"prompt": [1], "logit_bias": ((999, 1.0),)}, BadRequest, "logit_bias"),
    ],
)
def test_what_cannot_run_is_refused(
    make_generation: Make, change: dict[str, object], error: type[Exception], match: str
) -> None:
    """A refusal names its reason and leaves nothing behind."""
    engine = engine_with()
    options = dict(change)
    with pytest.raises(error, match=match):
        engine.add(make_generation("a", options.pop("prompt"), **options))
    assert not engine.has_work


def test_constraints_are_refused_until_there_are_any(make_generation: Make) -> None:
    """Nothing is silently unconstrained."""
    import msgspec

    generation = msgspec.structs.replace(make_generation("a", [1]), constraint=Constraint("json", "{}"))
    with pytest.raises(BadRequest, match="constraint"):
        engine_with().add(generation)


def test_an_id_in_use_is_refused(make_generation: Make) -> None:
    """Two generations of one id could not be told apart."""
    engine = engine_with()
    engine.add(make_generation("a", [1]))
    with pytest.raises(BadRequest, match="running already"):
        engine.add(make_generation("a", [1]))


def test_end_all_ends_everything(make_generation: Make) -> None:
    """At a shutdown every choice gets its end."""
    engine = engine_with()
    engine.add(make_generation("a", [1, 2], n=2))
    outputs = engine.end_all(Terminal.LOST, "gone")
    assert [(o.choice, o.finish, o.error) for o in outputs] == [
        (0, Terminal.LOST, "gone"),
        (1, Terminal.LOST, "gone"),
    ]
    assert not engine.has_work


def test_queue_time_and_cached_tokens_come_with_the_first_output_only(make_generation: Make) -> None:
    """They are facts of the admission, not of the step."""
    clock = VirtualClock()
    engine = engine_with(clock=clock)
    engine.add(make_generation("a", [1, 2, 3], max_tokens=3))
    clock.advance(2.0)
    outputs = run(engine)["a", 0]
    assert [o.queued_s for o in outputs] == [2.0, None, None]
    assert [o.cached is None for o in outputs] == [False, True, True]
