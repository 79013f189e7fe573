"""The rules by which links come and go with leases."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.lease import Lease
from antiphon.router.members import GONE_AFTER_S, Change, Members
from support.leasing import lease

A, B = "ws://a:1/link", "ws://b:1/link"


class Scene:
    """A gateway's members over time. `leased`: who has a lease now."""

    def __init__(self, *fixed: str) -> None:
        self.members = Members(lambda model: model == "scripted", fixed)
        self.leased: dict[str, tuple[str, Lease]] = {}
        self.links: set[str] = set(fixed)
        self.now = 0.0

    def join(self, address: str, model: str = "scripted", *, draining: bool = False) -> str:
        """A new worker has a lease; its id."""
        one = lease("http://said:1", model, draining=draining)
        self.leased[one.id] = address, one
        return one.id

    def read(self, up: Iterable[str] = (), after_s: float = 1.0) -> Change:
        """One read, so much later."""
        self.now += after_s
        ids = list(self.leased)
        asked = self.members.unread(ids, set(up))
        change = self.members.take(ids, {i: self.leased[i] for i in asked}, set(up), self.now)
        self.links = (self.links | set(change.add)) - set(change.remove)
        return change


def test_lease_brings_a_link_once() -> None:
    """The first read adds it, the next ones say nothing."""
    scene = Scene()
    scene.join(A)
    assert scene.read() == Change(add=(A,))
    assert scene.read() == scene.read([A]) == Change()


def test_two_leases_of_one_address_bring_one_link() -> None:
    """A worker that was started again at its port: the lease of its former life has not ended yet."""
    scene = Scene()
    scene.join(A)
    scene.join(A)
    assert scene.read() == Change(add=(A,))
    assert scene.members.num_known == 2


def test_link_that_is_up_is_proof_of_life() -> None:
    """Redis comes back empty: nobody goes while links are up, however long it takes."""
    scene = Scene()
    scene.join(A)
    scene.read()
    scene.leased.clear()
    for _ in range(20):
        assert scene.read([A], GONE_AFTER_S) == Change()


def test_lease_without_a_link_is_kept() -> None:
    """A worker this gateway cannot reach just now, but which renews its lease, stays on the list."""
    scene = Scene()
    scene.join(A)
    scene.read()
    for _ in range(20):
        assert scene.read([], GONE_AFTER_S) == Change()


def test_worker_goes_when_lease_and_link_were_gone_for_a_while() -> None:
    """Both, and for GONE_AFTER_S together; then a new lease brings it again."""
    scene = Scene()
    worker = scene.join(A)
    scene.read()
    kept = scene.leased.pop(worker)
    assert scene.read([]) == Change()
    assert scene.read([], GONE_AFTER_S - 0.5) == Change()
    assert scene.read([], 0.5) == Change(remove=(A,))
    scene.leased[worker] = kept  # it was stopped, not dead
    assert scene.read() == Change(add=(A,))


def test_link_that_comes_back_in_time_starts_the_count_anew() -> None:
    """Silence must be whole."""
    scene = Scene()
    worker = scene.join(A)
    scene.read()
    del scene.leased[worker]
    scene.read([], 1.0)
    scene.read([A], GONE_AFTER_S - 1)
    scene.read([], 1.0)
    assert scene.read([], GONE_AFTER_S - 1) == Change()
    assert scene.read([], 1.0) == Change(remove=(A,))


def test_time_in_which_nothing_could_be_read_does_not_count() -> None:
    """Redis is lost while a worker is down: it keeps its full time from the first good read on."""
    scene = Scene()
    worker = scene.join(A)
    scene.read()
    del scene.leased[worker]
    scene.read([])
    scene.members.lost_sight()
    assert scene.read([], 100.0) == Change()
    assert scene.read([], GONE_AFTER_S - 0.1) == Change()
    assert scene.read([], 0.1) == Change(remove=(A,))


def test_addresses_that_others_gave_are_not_touched() -> None:
    """A static worker with a lease is not added twice, and is never removed."""
    scene = Scene(A)
    worker = scene.join(A)
    assert scene.read() == Change()
    del scene.leased[worker]
    assert scene.read([], 2 * GONE_AFTER_S) == scene.read([], 2 * GONE_AFTER_S) == Change()


def test_worker_that_drains_gets_no_new_link() -> None:
    """A gateway that starts now has nothing to ask of it; one that has a link keeps it."""
    scene = Scene()
    scene.join(A, draining=True)
    assert scene.read() == Change()


def test_models_that_are_not_offered_are_looked_at_once() -> None:
    """Another gateway's workers cost this one neither a link nor a read a second."""
    scene = Scene()
    other, mine = scene.join(B, "another"), scene.join(A)
    assert set(scene.members.unread([other, mine], set())) == {other, mine}
    assert scene.read() == Change(add=(A,))
    assert scene.members.unread([other, mine], {A}) == []
    assert scene.members.unread([other, mine], set()) == [mine]  # its link is down: has it a lease?


def test_settled_fleet_needs_no_leases_read() -> None:
    """Links that are up are not asked about; who is new is."""
    scene = Scene()
    scene.join(A)
    scene.read()
    new = scene.join(B)
    assert scene.members.unread(list(scene.leased), {A}) == [new]


def test_lease_that_cannot_be_read_changes_nothing() -> None:
    """A shard that is away, a forged value over a true one: what was known goes on."""
    scene = Scene()
    worker = scene.join(A)
    scene.read()
    for at in range(1, 10):
        assert scene.members.take([worker], {}, set(), at * GONE_AFTER_S) == Change()
    assert scene.members.num_known == 1


@given(
    st.lists(
        st.tuples(
            st.sets(st.integers(0, 3)),
            st.sets(st.integers(0, 3)),
            st.booleans(),
            st.floats(0.1, 2 * GONE_AFTER_S),
        ),
        max_size=30,
    )
)
def test_nobody_with_a_lease_or_a_link_is_ever_removed(
    moments: list[tuple[set[int], set[int], bool, float]],
) -> None:
    """Whatever comes and goes: at each good read exactly the leased are linked, and who goes is silent."""
    scene = Scene()
    workers = [lease("http://said:1") for _ in range(4)]
    for leased, up, is_lost, after_s in moments:
        if is_lost:
            scene.members.lost_sight()
            continue
        scene.leased = {workers[i].id: (f"ws://{i}/link", workers[i]) for i in leased}
        urls = {f"ws://{i}/link" for i in up} & scene.links
        change = scene.read(urls, after_s)
        assert not set(change.remove) & urls
        assert not set(change.remove) & {address for address, _ in scene.leased.values()}
        assert {address for address, _ in scene.leased.values()} | urls <= scene.links
