"""Random life on the engine: whatever is added, aborted and evicted, tokens are those of a quiet run.

The scripted runner's tokens depend on the KV it was given, so a wrong block, a stale copy or a hole
shows as other text.
"""

from __future__ import annotations

from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from antiphon.core.clock import VirtualClock
from antiphon.core.generation import Generation, Sampling, StepOutput, Terminal
from antiphon.core.scope import tenant_part_of
from antiphon.engine.engine import Engine, EngineSettings
from antiphon.engine.scripted import SCRIPTS, ScriptedRunner, ScriptedSettings

RUNNER = ScriptedSettings(context_tokens=96, block_tokens=4, max_sequences=3)
ENDS_WELL = {Terminal.LENGTH, Terminal.STOP}


def quiet_answer(generation: Generation, choice: int) -> list[int]:
    """What an engine with nothing else to do answers."""
    engine = Engine(
        ScriptedRunner(SCRIPTS["noise"], RUNNER),
        EngineSettings(num_blocks=200, token_budget=16),
        VirtualClock(),
    )
    engine.add(generation)
    found: list[int] = []
    while engine.has_work:
        for output in engine.step():
            if output.choice == choice:
                found += output.ids
    return found


class EngineMachine(RuleBasedStateMachine):
    """Adds, aborts and steps in any order, with few blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(
            ScriptedRunner(SCRIPTS["noise"], RUNNER),
            EngineSettings(num_blocks=30, token_budget=7, max_waiting=50),
            VirtualClock(),
        )
        self.generations: dict[str, Generation] = {}
        self.outputs: dict[tuple[str, int], list[StepOutput]] = defaultdict(list)

    @rule(
        trunk=st.integers(0, 2),
        length=st.integers(1, 40),
        tail=st.lists(st.integers(0, 5), max_size=3),
        n=st.integers(1, 2),
        max_tokens=st.integers(1, 30),
    )
    def add(self, trunk: int, length: int, tail: list[int], n: int, max_tokens: int) -> None:
        """Prompts from few trunks, so that they share prefixes of any length."""
        name = f"g{len(self.generations)}"
        prompt = [(trunk * 50 + i) % 256 for i in range(length)] + tail
        generation = Generation(
            id=name,
            model="m",
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            n=n,
            sampling=Sampling(seed=len(prompt), max_tokens=max_tokens, temperature=0.8, stop_ids=(257,)),
        )
        self.generations[name] = generation
        self.engine.add(generation)

    @rule(data=st.data())
    @precondition(lambda self: self.generations)
    def abort(self, data: st.DataObject) -> None:
        """Any generation, at any moment, one choice or all."""
        name = data.draw(st.sampled_from(sorted(self.generations)))
        self.engine.abort(name, data.draw(st.sampled_from([None, 0, 1])))

    @rule()
    def forget(self) -> None:
        """The tenant is erased: nothing of it is left but what is in use, and answers stay what they are."""
        self.engine.forget({tenant_part_of(b"tenant:local")})
        assert self.engine.load().cached_blocks == 0

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        """Some steps."""
        for _ in range(count):
            for output in self.engine.step():
                self.outputs[output.generation, output.choice].append(output)

    @invariant()
    def blocks_add_up(self) -> None:
        """free + cached + used = all, hashes and blocks agree."""
        self.engine.check()

    def teardown(self) -> None:
        """Run dry: one end per choice, and every completed answer is that of the quiet run."""
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.step(1)
        assert not self.engine.has_work
        self.engine.check()
        for name, generation in self.generations.items():
            for choice in range(generation.n):
                outputs = self.outputs[name, choice]
                assert [o.finish is None for o in outputs] == [True] * (len(outputs) - 1) + [False]
                found = [i for output in outputs for i in output.ids]
                expected = quiet_answer(generation, choice)
                if outputs[-1].finish in ENDS_WELL:
                    assert found == expected
                else:
                    assert found == expected[: len(found)]


EngineMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestEngineMachine = EngineMachine.TestCase
