"""Rows of usage under any order of opening, counting, ending, writing, failing and being swept."""

from __future__ import annotations

import asyncio
import datetime
import itertools
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from sqlalchemy import select

from antiphon.gateway.usageledger import Ledger
from antiphon.store.database import Database, file_url
from antiphon.store.schema import UsageRow
from antiphon.store.usage import LOST, Ending, Opening, Tally, UsageStore

NOON = datetime.datetime(2026, 12, 1, 12, tzinfo=datetime.UTC)
NUMBERS = itertools.count()
GATEWAYS = itertools.count()


class Books(RuleBasedStateMachine):
    """One gateway's ledger in front of a real database. `model`: what must be there in the end."""

    def __init__(self, runner: asyncio.Runner, database: Database) -> None:
        super().__init__()
        self.runner = runner
        self.database = database
        self.store = UsageStore(database)
        self.gateway = f"gw_{next(GATEWAYS)}"
        self.ledger = Ledger(most_waiting=6, most_at_once=2)
        self.open_rows: list[str] = []
        self.counted: dict[str, set[int]] = {}  # by row, what was said of its answer tokens
        self.ended: dict[str, int | None] = {}  # by row, what its end said; None: there was no room for it

    @rule()
    def open(self) -> None:
        row = f"req_{next(NUMBERS)}"
        opening = Opening(
            id=row,
            tenant_id="local",
            key_id=None,
            gateway_id=self.gateway,
            model="m",
            endpoint="e",
            opened_at=NOON,
        )
        if self.ledger.open(opening):
            self.open_rows.append(row)
            self.counted[row] = {0}

    @precondition(lambda self: self.open_rows)
    @rule(data=st.data(), tokens=st.integers(1, 1000))
    def count(self, data: st.DataObject, tokens: int) -> None:
        row = data.draw(st.sampled_from(self.open_rows))
        self.ledger.count(row, Tally(model="m", answer_tokens=tokens))
        self.counted[row].add(tokens)

    @precondition(lambda self: self.open_rows)
    @rule(data=st.data(), tokens=st.integers(1, 1000))
    def end(self, data: st.DataObject, tokens: int) -> None:
        row = data.draw(st.sampled_from(self.open_rows))
        self.open_rows.remove(row)
        tally = Tally(model="m", answer_tokens=tokens)
        is_kept = self.ledger.end(row, Ending(tally=tally, closed_at=NOON, outcome="ok", status=200))
        self.ended[row] = tokens if is_kept else None

    @rule(fate=st.sampled_from(["done", "refused", "unknown"]))
    def write(self, fate: str) -> None:
        batch = self.ledger.take()
        if fate != "refused":
            self.runner.run(self.store.write(batch))
        if fate == "done":
            self.ledger.written()
        else:
            self.ledger.failed()

    @rule()
    def sweep(self) -> None:
        self.runner.run(self.store.sweep({self.gateway: None}, NOON))

    def teardown(self) -> None:
        while self.ledger.has_more:
            self.write("done")
        assert self.ledger.num_waiting == 0
        rows = self.runner.run(self._rows())
        assert rows.keys() == self.counted.keys()
        for row, (outcome, tokens) in rows.items():
            if self.ended.get(row) is not None:
                assert (outcome, tokens) == ("ok", self.ended[row])
            else:
                assert outcome in (None, LOST)
                assert tokens in self.counted[row]

    async def _rows(self) -> dict[str, tuple[str | None, int]]:
        query = select(UsageRow.id, UsageRow.outcome, UsageRow.answer_tokens)
        async with self.database.reading() as connection:
            rows = await connection.execute(query.where(UsageRow.gateway_id == self.gateway))
            return {row: (outcome, tokens) for row, outcome, tokens in rows}


def test_no_row_is_lost_or_ends_twice(tmp_path: Path) -> None:
    """Whatever fails and is repeated, every row that was taken in is there once, with its end where one
    was taken in, and else with what was counted.
    """
    with asyncio.Runner() as runner:
        database = runner.run(Database.open(file_url(tmp_path / "usage.db")))
        try:
            run_state_machine_as_test(
                lambda: Books(runner, database),
                settings=settings(
                    max_examples=60,
                    stateful_step_count=30,
                    deadline=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            runner.run(database.close())
