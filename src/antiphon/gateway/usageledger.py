"""What a gateway has still to write of its rows of usage. Pure: no clock, no database.

Invariants: of a row the opening is written first or with the rest; an end is kept until it is written,
whatever fails meanwhile; what waits is bounded, and what finds no room is said to be dropped, never
forgotten in silence. Nothing else may be taken while a batch is under way.
"""

from __future__ import annotations

from itertools import islice

from antiphon.store.usage import Batch, Ending, Opening, Tally

MOST_WAITING = 10_000  # openings, and as many ends
MOST_AT_ONCE = 500  # of each in one batch


class Ledger:
    """The rows of one gateway on their way into the database."""

    def __init__(self, most_waiting: int = MOST_WAITING, most_at_once: int = MOST_AT_ONCE) -> None:
        self._most_waiting = most_waiting
        self._most_at_once = most_at_once
        self._openings: dict[str, Opening] = {}
        self._tallies: dict[str, Tally] = {}
        self._endings: dict[str, Ending] = {}
        self._taken = Batch()
        self._taken_openings: frozenset[str] = frozenset()

    @property
    def num_waiting(self) -> int:
        """Openings and ends that are not in the database."""
        taken = len(self._taken.openings) + len(self._taken.endings)
        return len(self._openings) + len(self._endings) + taken

    @property
    def has_more(self) -> bool:
        """Whether there is something to take."""
        return bool(self._openings or self._tallies or self._endings)

    def is_waiting(self, row: str) -> bool:
        """Whether the opening of this row is here and not in the database."""
        return row in self._openings or row in self._taken_openings

    def open(self, opening: Opening) -> bool:
        """Take in a new row; False where there is no room for it."""
        if len(self._openings) + len(self._taken_openings) >= self._most_waiting:
            return False
        self._openings[opening.id] = opening
        return True

    def count(self, row: str, tally: Tally) -> None:
        """This much was used so far. For rows that were opened here and have not ended."""
        self._tallies[row] = tally

    def end(self, row: str, ending: Ending) -> bool:
        """The end of a row that was opened here; False where there is no room for it."""
        self._tallies.pop(row, None)
        if len(self._endings) + len(self._taken.endings) >= self._most_waiting:
            return False
        self._endings[row] = ending
        return True

    def take(self) -> Batch:
        """What is to be written now. It must be `written` or `failed` before the next is taken."""
        assert self._taken.is_empty
        openings = list(islice(self._openings.values(), self._most_at_once))
        for opening in openings:
            del self._openings[opening.id]
        tallies = {row: tally for row, tally in self._tallies.items() if row not in self._openings}
        ready = ((row, ending) for row, ending in self._endings.items() if row not in self._openings)
        endings = dict(islice(ready, self._most_at_once))
        for row in tallies:
            del self._tallies[row]
        for row in endings:
            del self._endings[row]
        self._taken = Batch(openings, tallies, endings)
        self._taken_openings = frozenset(opening.id for opening in openings)
        return self._taken

    def written(self) -> None:
        """What was taken is in the database."""
        self._taken, self._taken_openings = Batch(), frozenset()

    def failed(self) -> None:
        """It may be there or not: it waits again, ahead of what came since."""
        taken = self._taken
        self.written()
        self._openings = {opening.id: opening for opening in taken.openings} | self._openings
        self._endings = {**taken.endings, **self._endings}
        for row, tally in taken.tallies.items():
            if row not in self._endings:
                self._tallies.setdefault(row, tally)
