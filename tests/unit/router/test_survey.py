"""What a gateway knows of its workers, and whom its picker takes for it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from random import Random

import msgspec
import pytest

from antiphon.core.blockhash import Border, chain_root, extend_chain
from antiphon.core.clock import VirtualClock
from antiphon.core.errors import NoReplica
from antiphon.core.generation import Generation, Load, Role, Sampling, WorkerRates
from antiphon.core.kvblock import Tier
from antiphon.core.wire import BlockChange, Blocks, pack_keys
from antiphon.router.candidates import NUM_FEW
from antiphon.router.link import LinkListener, WorkerLink
from antiphon.router.picker import Picker
from antiphon.router.rivals import PolicyName, policy_named
from antiphon.router.survey import Survey
from support.lines import Lines
from support.loopback import worker_info

NAMESPACE = "00112233aabbccdd"
BLOCK_TOKENS = 16
RATES = WorkerRates(prefill_tokens_per_s=1000.0, step_s=0.02)
IDLE = Load(0, 0, 0, 0, 1000, 0, 0, rates=RATES)


class Deaf:
    """Hears nothing: these links never run."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **fields: None


class World:
    """A survey, and links that are up because it was told so."""

    def __init__(self, policy: PolicyName = PolicyName.COST) -> None:
        draws = itertools.cycle((0.0, 0.3, 0.6, 0.9))
        self.survey = Survey(VirtualClock(), lambda: next(draws), shows_all=policy.compares_all)
        self.picker = Picker(self.survey, policy_named(policy), Random(1).random)
        self._numbers = itertools.count()
        self._listener: LinkListener = Deaf()

    def worker(self, load: Load = IDLE, role: Role = Role.BOTH, model: str = "scripted") -> WorkerLink:
        number = next(self._numbers)
        link = WorkerLink(f"http://w{number}:1", "", self._listener, Lines().logger(), number)
        link.info = worker_info(
            model,
            worker=f"w{number}",
            namespace=NAMESPACE,
            block_tokens=BLOCK_TOKENS,
            num_blocks=1000,
            role=role,
        )
        link.load = load
        link.life = 1
        self.survey.link_is_up(link)
        return link

    def tell(
        self, link: WorkerLink, generation: Generation, num_blocks: int, tier: Tier = Tier.ENGINE
    ) -> None:
        """The worker says that it holds this prompt's first blocks."""
        keys = pack_keys(hashes(generation)[:num_blocks])
        change = BlockChange(is_stored=True, tier=tier, keys=keys)
        self.survey.take_blocks(link, Blocks(life=1, number=1, changes=[change], part=0, is_last=True))


@pytest.fixture
def world() -> World:
    return World()


def prompt(num_tokens: int, first: int = 7, scope: bytes = b"ada") -> Generation:
    return Generation(
        id="g",
        model="scripted",
        sampling=Sampling(seed=1, max_tokens=16),
        token_ids=[first] * num_tokens,
        num_prompt_tokens=num_tokens,
        scope=scope,
    )


def hashes(generation: Generation) -> list[bytes]:
    made: list[bytes] = []
    root = chain_root(bytes.fromhex(NAMESPACE), generation.kv_scope)
    extend_chain(made, root, generation.token_ids, BLOCK_TOKENS, Border(0, generation.kv_scope))
    return made


def test_a_prompt_goes_where_its_blocks_are(world: World) -> None:
    """The worker that holds its beginning, and the route says so."""
    world.worker()
    holder = world.worker()
    world.worker()
    generation = prompt(1000)
    world.tell(holder, generation, 50)
    pick = world.picker.pick(generation)
    assert pick.link is holder
    assert pick.num_uncached == 1000 - 50 * BLOCK_TOKENS
    assert pick.route.startswith("w1 prefix ")


def test_blocks_of_another_tenant_attract_nothing(world: World) -> None:
    """The same words of somebody else are another prompt."""
    holder = world.worker(msgspec.structs.replace(IDLE, waiting_tokens=100))
    other = world.worker()
    world.tell(holder, prompt(1000), 50)
    assert world.picker.pick(prompt(1000, scope=b"bob")).link is other


def test_a_busy_holder_loses_to_an_idle_worker(world: World) -> None:
    """When its queue costs more than computing the prompt anew."""
    holder = world.worker(msgspec.structs.replace(IDLE, waiting_tokens=5000))
    other = world.worker()
    generation = prompt(1000)
    world.tell(holder, generation, 50)
    pick = world.picker.pick(generation)
    assert pick.link is other
    assert " spill " in pick.route


def test_what_the_store_has_counts_where_it_is_reached(world: World) -> None:
    """Blocks in the store spare a worker their computing, if its rates say that it reaches the store."""
    rates = WorkerRates(1000.0, 0.02, store_rtt_s=0.001, store_blocks_per_s=1000.0)
    near = world.worker(msgspec.structs.replace(IDLE, rates=rates))
    writer = world.worker(msgspec.structs.replace(IDLE, waiting_tokens=5000))
    generation = prompt(1000)
    world.tell(writer, generation, 50, Tier.STORE)
    view = world.survey.view(generation)
    stored = {state.replica: o.store_blocks for state, o in zip(view.states, view.overlaps, strict=True)}
    assert stored == {near.replica: 50, writer.replica: 0}


def test_who_takes_no_work_is_no_candidate(world: World) -> None:
    """Draining, leaving or down: never picked, whatever they hold; with nobody left it is an error."""
    draining, leaving, down = world.worker(), world.worker(), world.worker()
    last = world.worker()
    generation = prompt(1000)
    for link in (draining, leaving, down):
        world.tell(link, generation, 50)
    draining.load = msgspec.structs.replace(IDLE, draining=True)
    world.survey.load_changed(draining)
    leaving.is_leaving = True  # and nobody said so
    world.survey.link_is_down(down)
    assert {world.picker.pick(generation).link for _ in range(8)} == {last}
    world.survey.link_is_down(last)
    with pytest.raises(NoReplica):
        world.picker.pick(generation)


def test_a_worker_that_came_back_holds_nothing(world: World) -> None:
    """Its blocks died with it."""
    link = world.worker()
    generation = prompt(1000)
    world.tell(link, generation, 50)
    world.survey.link_is_down(link)
    world.survey.link_is_up(link)
    assert world.picker.pick(generation).num_uncached == 1000


def test_models_do_not_mix(world: World) -> None:
    """A generation goes to a worker of its model, and to nobody where there is none."""
    world.worker(model="other")
    with pytest.raises(NoReplica, match="scripted"):
        world.picker.pick(prompt(10))
    mine = world.worker()
    assert world.picker.pick(prompt(10)).link is mine


def test_those_to_avoid_are_a_last_resort(world: World) -> None:
    """Somebody else if there is somebody, else the one that was to be avoided."""
    one, other = world.worker(), world.worker()
    assert {world.picker.pick(prompt(10), [one]).link for _ in range(8)} == {other}
    assert world.picker.pick(prompt(10), [one, other]).link in (one, other)


def test_of_many_workers_few_are_looked_at_and_the_holder_is_among_them(world: World) -> None:
    """However many there are, a choice looks at a handful."""
    links = [world.worker() for _ in range(10 * NUM_FEW)]
    generation = prompt(1000)
    world.tell(links[123], generation, 50)
    assert len(world.survey.view(generation).states) <= NUM_FEW
    assert world.picker.pick(generation).link is links[123]


def many(policy: PolicyName, loads: list[Load]) -> World:
    """More workers than the policy of costs would look at."""
    world = World(policy)
    for load in loads:
        world.worker(load)
    return world


def test_the_least_loaded_of_many_is_the_least_loaded_of_all() -> None:
    """Though a usual request would be done later there than anywhere else."""
    loads = [msgspec.structs.replace(IDLE, running=2)] * (4 * NUM_FEW)
    loads[41] = msgspec.structs.replace(IDLE, running=1, waiting_tokens=90_000)
    world = many(PolicyName.LEAST_LOADED, loads)
    assert {world.picker.pick(prompt(100)).link.replica for _ in range(20)} == {41}


def test_power_of_two_draws_from_all() -> None:
    """Of many equal workers with prompts in progress each gets its part, the idle-looking ones no more."""
    world = many(
        PolicyName.POWER_OF_TWO, [msgspec.structs.replace(IDLE, waiting_tokens=n) for n in range(64)]
    )
    taken = Counter(world.picker.pick(prompt(100)).link.replica for _ in range(64 * 40))
    assert set(taken) == set(range(64))
    assert max(taken.values()) < 2 * 40


def test_round_robin_asks_each_of_many_once_before_any_again() -> None:
    """However busy they are."""
    world = many(
        PolicyName.ROUND_ROBIN, [msgspec.structs.replace(IDLE, waiting_tokens=1000 * n) for n in range(50)]
    )
    for _ in range(3):
        assert {world.picker.pick(prompt(100)).link.replica for _ in range(50)} == set(range(50))


def test_a_session_stays_with_one_of_many() -> None:
    """Every session, at every turn; and they are spread over all."""
    world = many(PolicyName.SESSION, [IDLE] * 60)
    asks = [msgspec.structs.replace(prompt(100), session=b"%d" % number) for number in range(200)]
    homes = [{world.picker.pick(ask).link.replica for _ in range(4)} for ask in asks]
    assert all(len(home) == 1 for home in homes)
    assert len(set().union(*homes)) > 50


def test_a_prefill_worker_answers_only_where_nobody_else_can(world: World) -> None:
    """Roles are for whole prompts too, where there is a store to hand over by."""
    stored = msgspec.structs.replace(RATES, store_rtt_s=0.001, store_blocks_per_s=1000.0)
    idle = msgspec.structs.replace(IDLE, rates=stored)
    lead = world.worker(idle, role=Role.PREFILL)
    assert world.picker.plan(prompt(100)).link is lead
    both = world.worker(msgspec.structs.replace(idle, waiting_tokens=9000))
    assert world.picker.plan(prompt(100)).link is both


def test_a_namespace_that_is_no_hex_is_a_worker_without_known_blocks(world: World) -> None:
    """A foreign worker may call its namespace what it likes."""
    link = world.worker()
    world.survey.link_is_down(link)
    link.info = worker_info("scripted", namespace="not hex")
    world.survey.link_is_up(link)
    assert world.picker.pick(prompt(100)).link is link
