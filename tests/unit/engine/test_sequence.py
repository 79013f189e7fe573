"""A sequence's blocks by scope and its hits by tier."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from antiphon.core.blockhash import PUBLIC_SCOPE
from antiphon.core.generation import CachedTokens, Generation, KvReport
from antiphon.core.kvblock import Tier
from antiphon.engine.sampling import Sampler
from antiphon.engine.sequence import Chain, Sequence, Supply

Make = Callable[..., Generation]
BLOCK = 4


def sequence_of(generation: Generation, supply: Supply | None = None) -> Sequence:
    sequence = Sequence(
        key=1,
        generation=generation,
        choice=0,
        tokens=list(generation.token_ids),
        sampler=Sampler(generation.sampling, 0, 999),
        chain=Chain.of(generation, b"namespace", BLOCK),
        arrived_s=0.0,
        deadline_s=None,
        supply=supply,
    )
    sequence.extend_hashes()
    return sequence


def test_blocks_carry_their_ids_and_their_scope(make_generation: Make) -> None:
    """Public ones the public scope, the others the generation's own."""
    made = make_generation("g", list(range(14)))
    sequence = sequence_of(msgspec.structs.replace(made, num_public_tokens=9, scope=b"own"))
    blocks = [sequence.block_at(index) for index in range(3)]
    assert [block.scope for block in blocks] == [PUBLIC_SCOPE, PUBLIC_SCOPE, b"own"]
    assert [block.token_ids for block in blocks] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert [block.hash for block in blocks] == sequence.hashes


def test_never_all_tokens_are_taken_over(make_generation: Make) -> None:
    """The last one must run to give logits."""
    usable = [sequence_of(make_generation("g", [1] * n)).num_usable_blocks for n in (1, 4, 5, 8, 9)]
    assert usable == [0, 0, 1, 1, 2]


def test_hits_are_told_by_tier(make_generation: Make) -> None:
    """Tokens for the bill, blocks for the log; what the tiers said of counts is replaced by what was used."""
    supply = Supply(report=KvReport(9, 9, 9, 9, 500, 0.1, 0.2, "fetched"))
    sequence = sequence_of(make_generation("g", list(range(21))), supply)
    supply.tiers = {sequence.hashes[1]: Tier.HOST, sequence.hashes[2]: Tier.STORE}
    sequence.count_hits(3)
    assert sequence.cached == CachedTokens(engine=4, host=4, store=4)
    assert sequence.report == KvReport(1, 1, 1, 2, 500, 0.1, 0.2, "fetched")


def test_tokens_of_an_answer_do_not_count_as_prompt(make_generation: Make) -> None:
    """After a failover blocks reach beyond the prompt."""
    supply = Supply()
    sequence = sequence_of(make_generation("g", list(range(6)), received=list(range(10))), supply)
    supply.tiers = {block_hash: Tier.STORE for block_hash in sequence.hashes}
    sequence.count_hits(3)
    assert sequence.cached == CachedTokens(store=6)
    assert sequence.report is not None
    assert (sequence.report.num_store, sequence.report.num_computed) == (3, 0)


def test_what_came_counts_for_the_first_choice_alone(make_generation: Make) -> None:
    """For the others it was in the engine; and who is admitted again counts nothing anew."""
    supply = Supply()
    first, second = (sequence_of(make_generation("g", list(range(9))), supply) for _ in range(2))
    supply.tiers = {block_hash: Tier.HOST for block_hash in first.hashes}
    first.count_hits(2)
    second.count_hits(2)
    first.count_hits(0)
    assert (first.cached, second.cached) == (CachedTokens(host=8), CachedTokens(engine=8))
    assert second.report is None


def test_without_tiers_there_is_no_report(make_generation: Make) -> None:
    """An engine alone says only what it had."""
    sequence = sequence_of(make_generation("g", list(range(9))))
    sequence.count_hits(1)
    assert (sequence.cached, sequence.report) == (CachedTokens(engine=4), None)
