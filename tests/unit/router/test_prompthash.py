"""Keys of prompts: the engine's own chain, cut; computed no further than asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.clock import VirtualClock
from antiphon.core.generation import Generation, Sampling
from antiphon.core.kvblock import Tier
from antiphon.core.wire import pack_keys, unpack_keys
from antiphon.engine.engine import Engine, EngineSettings
from antiphon.engine.scripted import SCRIPTS, ScriptedRunner, ScriptedSettings
from antiphon.kv.events import Change, Directory
from antiphon.router.prompthash import PromptKeys
from antiphon.worker.blocknews import BlockFeed

NAMESPACE = bytes(range(32))


def generation(ids: list[int], **fields: object) -> Generation:
    values: dict[str, object] = {"num_prompt_tokens": len(ids)} | fields
    return Generation(id="g", model="m", sampling=Sampling(seed=1, max_tokens=1), token_ids=ids, **values)


def told_by_engine(asked: Generation) -> list[int]:
    """The keys a worker's engine says it has, when it has computed this prompt."""
    runner = ScriptedRunner(SCRIPTS["babble"], ScriptedSettings(context_tokens=512), lambda seconds: None)
    engine = Engine(runner, EngineSettings(num_blocks=32, namespace=NAMESPACE), VirtualClock())
    engine.add(asked)
    while engine.has_work:
        engine.step()
    changes = engine.take_hash_changes()
    assert changes is not None
    directory = Directory()
    directory.record(Change.STORED, Tier.ENGINE, changes.named)
    told = BlockFeed(directory).take()
    assert told is not None
    return [key for change in told.changes for key in unpack_keys(change.keys)]


@given(
    ids=st.integers(1, 150).flatmap(lambda num: st.lists(st.integers(0, 255), min_size=num, max_size=num)),
    num_public=st.integers(0, 150),
    scope=st.sampled_from([b"", b"\x01" * 32]),
    tenant=st.sampled_from(["local", "other"]),
)
def test_a_prompt_is_named_as_the_engine_names_it(
    ids: list[int], num_public: int, scope: bytes, tenant: str
) -> None:
    """Public prefix, scope and tenant included: what an engine tells is what a router looks for."""
    asked = generation(ids, num_public_tokens=min(num_public, len(ids)), scope=scope, tenant=tenant)
    keys = PromptKeys(asked, NAMESPACE, ScriptedSettings().block_tokens).upto(100)
    assert set(keys) <= set(told_by_engine(asked))
    assert len(keys) == (len(ids) - 1) // ScriptedSettings().block_tokens


def test_tenants_and_namespaces_never_find_each_others_blocks() -> None:
    """Row 36: the same tokens of another tenant, scope or model have other keys from the first block on."""
    ids = list(range(100))
    prompts = [
        PromptKeys(generation(ids, tenant="a"), NAMESPACE, 16),
        PromptKeys(generation(ids, tenant="b"), NAMESPACE, 16),
        PromptKeys(generation(ids, tenant="a", scope=b"\x01" * 32), NAMESPACE, 16),
        PromptKeys(generation(ids, tenant="a"), bytes(32), 16),
    ]
    keys = [key for prompt in prompts for key in prompt.upto(6)]
    assert len(keys) == len(set(keys)) == 24


def test_tenants_share_public_blocks_only() -> None:
    """Behind the operator's public prefix each one's blocks are its own."""
    ids = list(range(100))
    one = PromptKeys(generation(ids, tenant="a", num_public_tokens=40), NAMESPACE, 16).upto(6)
    two = PromptKeys(generation(ids, tenant="b", num_public_tokens=40), NAMESPACE, 16).upto(6)
    assert one[:2] == two[:2]
    assert not set(one[2:]) & set(two[2:])


@given(steps=st.lists(st.integers(0, 12), max_size=8))
def test_keys_come_as_far_as_they_are_asked_for(steps: list[int]) -> None:
    """In any steps the same keys as at once, and never more than asked for."""
    asked = generation(list(range(160)), num_public_tokens=50)
    whole = PromptKeys(asked, NAMESPACE, 16).upto(99)
    assert len(whole) == 9
    keys = PromptKeys(asked, NAMESPACE, 16)
    most = 0
    for step in steps:
        most = max(most, step)
        assert keys.upto(step) == whole[:most]


def test_where_there_is_nothing_to_name_there_are_no_keys() -> None:
    """An empty prompt, one shorter than a block, a replica that has no blocks."""
    assert PromptKeys(generation([]), NAMESPACE, 16).upto(9) == []
    assert PromptKeys(generation([1] * 16), NAMESPACE, 16).upto(9) == []
    assert PromptKeys(generation([1] * 99), NAMESPACE, 0).upto(9) == []


def test_packing_keeps_the_first_bytes_of_each_hash() -> None:
    """Equal keys for equal hashes, others for others."""
    hashes = [bytes([n]) * 32 for n in range(5)]
    assert len(pack_keys(hashes)) == 40
    assert len(set(unpack_keys(pack_keys(hashes)))) == 5
    assert unpack_keys(pack_keys(hashes[:2])) == unpack_keys(pack_keys(hashes))[:2]
