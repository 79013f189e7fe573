"""Which replicas get no work because their answers fail. Pure.

After `FAILURES` bad incidents in a row (no answer completed in between) a replica is ejected, for
`EJECT_S` times the number of ejections so far. Then one request goes there as a probe: if it completes
the replica is back, if it fails it is ejected for longer. An incident is a death, a stall, or a frame
in which answers failed, however many: what a batch loses together is one fault. Invariants: where more
than half of the replicas are ejected none is barred (then it is not the replicas), so never the last.

One that is far slower than the others (pace.py) is ejected likewise, after five looks in a row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from antiphon.core.clock import Clock

FAILURES = 5
EJECT_S = 30.0
MOST_S = 300.0
PROBE_S = 30.0  # a probe that has not ended by then may have been given up by its client: send another


@dataclass(slots=True)
class _Record:
    num_failures: int = 0  # in a row
    num_completed: int = 0  # when it failed last
    num_slow: int = 0  # looks in a row that found it slow
    num_ejections: int = 0
    until_s: float | None = None  # None: not ejected
    probed_s: float | None = None  # when the probe was sent


class Ejections:
    """Replicas by address, with the number of answers each has completed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}

    def __bool__(self) -> bool:
        """Whether any replica ever failed."""
        return bool(self._records)

    def note_failure(self, replica: str, num_completed: int) -> bool:
        """A bad incident. True where it is ejected by it."""
        record = self._records.setdefault(replica, _Record())
        self._take_note(record, num_completed)
        record.num_failures += 1
        is_probe = record.until_s is not None and record.probed_s is not None
        if not is_probe and (record.until_s is not None or record.num_failures < FAILURES):
            return False
        self._eject(record)
        return True

    def note_pace(self, replica: str, *, is_slow: bool) -> bool:
        """A look at how fast it is. True where it is ejected by it."""
        if not is_slow and replica not in self._records:
            return False
        record = self._records.setdefault(replica, _Record())
        record.num_slow = record.num_slow + 1 if is_slow else 0
        if record.until_s is not None or record.num_slow < FAILURES:
            return False
        self._eject(record)
        return True

    def note_sent(self, replica: str) -> None:
        """It was given a request: where it is due for a probe, that is it."""
        record = self._records.get(replica)
        if record is not None and record.until_s is not None and record.until_s <= self._clock.now():
            record.probed_s = self._clock.now()

    def is_ejected(self, replica: str, num_completed: int) -> bool:
        """Whether it is to get nothing now."""
        record = self._records.get(replica)
        if record is None:
            return False
        self._take_note(record, num_completed)
        if record.until_s is None:
            return False
        now = self._clock.now()
        is_probing = record.probed_s is not None and now - record.probed_s < PROBE_S
        return now < record.until_s or is_probing

    def barred(self, replicas: Iterable[tuple[str, int]]) -> set[str]:
        """Those of a model's replicas (address, answers completed) that are to be passed over."""
        every = list(replicas)
        ejected = {replica for replica, completed in every if self.is_ejected(replica, completed)}
        return set() if 2 * len(ejected) > len(every) else ejected

    def keep_only(self, replicas: Collection[str]) -> None:
        """Others have left the fleet."""
        self._records = {name: record for name, record in self._records.items() if name in replicas}

    def _eject(self, record: _Record) -> None:
        record.num_ejections += 1
        record.until_s = self._clock.now() + min(MOST_S, EJECT_S * record.num_ejections)
        record.probed_s = None
        record.num_slow = 0

    def _take_note(self, record: _Record, num_completed: int) -> None:
        if num_completed == record.num_completed:
            return
        record.num_completed = num_completed
        record.num_failures = 0
        if record.probed_s is not None:  # what completed may have been the probe
            record.until_s = record.probed_s = None
        elif record.until_s is None and record.num_slow == 0:
            record.num_ejections = 0
