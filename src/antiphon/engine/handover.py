"""KV blocks going in and out of an engine: taken over from elsewhere, offered for copying out.

Owns which held blocks were offered. Invariants: a block is offered once while it is held, and never
if it came from elsewhere, unless a generation that is there for its prompt's blocks only asks again, or
it is known to be lost there; it is found under its hash only when all of it is here; what a running
sequence uses is never given up for it. Of a chain only what follows the blocks here without a gap is
taken in: anything else is a miss.

Payloads come verified (kv/codec.py); one that the runner refuses ends the chain like a miss. Who
stores the bytes is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TypeAlias

from antiphon.core.blockhash import BlockHash
from antiphon.core.kvblock import KvBlock, Tier
from antiphon.core.scope import tenant_part_of
from antiphon.engine.blocks import BlockManager
from antiphon.engine.counters import Counters
from antiphon.engine.runner import ModelRunner, RunnerFault
from antiphon.engine.sequence import Sequence, Supply

Arrival: TypeAlias = tuple[KvBlock, bytes | memoryview, Tier]


@dataclass(frozen=True, slots=True)
class OfferRule:
    """When running sequences' blocks are due: every `checkpoint_blocks` new ones. None: never, no block is.

    `is_early`: of prompts too, while the rest of the prompt is still being computed. Else from a
    prompt's end on, but for a generation that is there for its prompt's blocks only.
    """

    checkpoint_blocks: int | None
    is_early: bool = False


class Handover:
    """Imports and exports of one engine."""

    def __init__(
        self, blocks: BlockManager, runner: ModelRunner, counters: Counters, rule: OfferRule
    ) -> None:
        self._blocks = blocks
        self._runner = runner
        self._counters = counters
        self._rule = rule
        self._offered: set[int] = set()  # held blocks that were offered, or came from elsewhere
        self._due: dict[int, KvBlock] = {}  # those of them that `take_due` has not returned yet

    def take_in(self, sequence: Sequence, supply: Supply, arrivals: Iterable[Arrival]) -> None:
        """Cache what follows the blocks here of a waiting sequence, and note its tier in `supply`."""
        wanted = sequence.extend_hashes()[: sequence.num_usable_blocks]
        chain = self._blocks.find_prefix(wanted)
        self._blocks.acquire(chain)  # making room must not cost what the new ones follow
        try:
            for block, payload, tier in arrivals:
                if block.index < len(chain):
                    continue
                if (
                    block.index != len(chain)
                    or block.index >= len(wanted)
                    or block.hash != wanted[block.index]
                ):
                    break
                found = self._blocks.find_prefix([block.hash])
                if found:
                    self._blocks.acquire(found)
                else:
                    found = self._import(block, payload)
                    if not found:
                        break
                    supply.tiers[block.hash] = tier
                chain += found
        finally:
            self._blocks.release(chain)

    def note_kept(self, sequence: Sequence) -> None:
        """A running sequence has new full blocks: at its prompt's end, and now and then, they are due."""
        interval = self._rule.checkpoint_blocks
        if interval is None:
            return
        is_prompt_done = sequence.num_computed >= sequence.num_prompt_tokens
        if not is_prompt_done and not self._rule.is_early and not sequence.generation.is_prefill_only:
            return
        is_first = is_prompt_done and not sequence.is_prompt_offered
        if is_first or sequence.num_kept - sequence.num_offered >= interval:
            sequence.num_offered = sequence.num_kept
            sequence.is_prompt_offered = is_prompt_done
            self.offer(sequence)

    def offer(self, sequence: Sequence) -> None:
        """All its blocks that are here are due, because it ends, gives way, or has enough new ones."""
        if self._rule.checkpoint_blocks is None:
            return
        for index, number in enumerate(self._blocks.find_prefix(sequence.hashes)):
            if number not in self._offered:
                self._offered.add(number)
                self._due[number] = sequence.block_at(index)

    def offer_again(self, sequence: Sequence) -> None:
        """What a sequence found here is offered once more: its taker may not find it elsewhere any longer.

        But for what was just brought for it from there.
        """
        brought = sequence.supply.tiers if sequence.supply is not None else {}
        numbers = self._blocks.find_prefix(sequence.hashes)
        for number, block_hash in zip(numbers, sequence.hashes, strict=False):
            if block_hash not in brought and number not in self._due:
                self._offered.discard(number)

    def offer_anew(self, lost: Iterable[BlockHash]) -> None:
        """These are gone from where they were copied to: the next offer of their chains has them again."""
        for number in (number for block_hash in lost for number in self._blocks.find_prefix([block_hash])):
            if number not in self._due:
                self._offered.discard(number)

    def forget(self, evicted: Items[int]) -> None:
        """These blocks are held no more: tell the runner."""
        for number in evicted:
            self._runner.drop(number)
            self._offered.discard(number)
            self._due.pop(number, None)
        self._counters.evicted_blocks += len(evicted)

    def take_due(self) -> list[KvBlock]:
        """What became due since the last call and is still here, chains in order."""
        due = list(self._due.values())
        self._due.clear()
        return due

    def export(self, blocks: Items[KvBlock]) -> list[tuple[KvBlock, bytes]]:
        """The payloads of those that are still here, in their order."""
        held = [(block, found[0]) for block in blocks if (found := self._blocks.find_prefix([block.hash]))]
        if not held:
            return []
        try:
            payloads = self._runner.export_blocks([number for _, number in held])
        except RunnerFault:
            self._counters.failed_exports += 1
            return []
        self._counters.exported_blocks += len(held)
        return [(block, payload) for (block, _), payload in zip(held, payloads, strict=True)]

    def check(self) -> None:
        """Raises AssertionError where a block is marked that is not held."""
        assert self._due.keys() <= self._offered, "a block is due that was not offered"
        assert all(self._blocks.is_named(number) for number in self._offered), "an evicted block is marked"

    def _import(self, block: KvBlock, payload: bytes | memoryview) -> list[int]:
        """The number it is held under now; none where there is no room or the runner refuses it."""
        if self._blocks.num_available == 0:
            return []
        evicted: list[int] = []
        (number,) = self._blocks.allocate(1, evicted)
        self.forget(evicted)
        try:
            self._runner.import_block(number, payload)
        except (ValueError, RunnerFault):
            self._counters.refused_blocks += 1
            self._blocks.release([number])
            return []
        self._offered.add(number)
        self._counters.imported_blocks += 1
        return [self._blocks.register(number, block.hash, tenant_part_of(block.scope))]
