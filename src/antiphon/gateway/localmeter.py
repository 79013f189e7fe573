"""What one gateway knows of a meter by itself: enough to go on while the control Redis is away. Pure.

Counts this gateway's requests in windows of its own monotonic clock, and keeps the last word on budgets,
its own requests added. Invariants: bounded in time (slots that count no more are dropped) and in number
(`Meters` forgets who was idle longest); one with open requests is not forgotten.
"""

from __future__ import annotations

from collections import OrderedDict

from antiphon.core.metering import Standing, counts, slot_of
from antiphon.core.wait import ANSWER_TOKENS

MOST_METERS = 10_000
_NEWEST = 0.1  # weight of the newest answer in what is expected of the next


class LocalMeter:
    """One key or client token."""

    def __init__(self) -> None:
        self.num_open = 0
        self.open_tokens = 0  # as they were estimated
        self.is_unshared = False  # something passed here while Redis was away, which its budgets lack
        self.answer_tokens = float(ANSWER_TOKENS)  # of one answer, as expected
        self.spent: dict[str, int] = {}  # by period (a day, a month, all its life): as known, of all gateways
        self._requests: dict[int, int] = {}
        self._tokens: dict[int, int] = {}

    def add(self, now_s: float, slot: int, requests: int, tokens: int) -> None:
        """Count; what counts no more is dropped, and so is what is to go where nothing counts."""
        now_slot = slot_of(now_s)
        for slots, amount in ((self._requests, requests), (self._tokens, tokens)):
            if amount and counts(slot, now_slot):
                slots[slot] = slots.get(slot, 0) + amount
            for old in [known for known in slots if not counts(known, now_slot)]:
                del slots[old]
        for period in self.spent:
            self.spent[period] += tokens

    def standing(self, now_s: float, day: str, month: str, life: str) -> Standing:
        """As far as this gateway knows."""
        return Standing(
            now_s=now_s,
            requests=dict(self._requests),
            tokens=dict(self._tokens),
            concurrent=self.num_open,
            day=self.spent.get(day, 0),
            month=self.spent.get(month, 0),
            total=self.spent.get(life, 0),
        )

    def learn(self, answer_tokens: float) -> None:
        """An answer had so many."""
        self.answer_tokens += _NEWEST * (answer_tokens - self.answer_tokens)


class Meters:
    """All that were used lately, by id."""

    def __init__(self, most: int = MOST_METERS) -> None:
        self._most = most
        self._meters: OrderedDict[str, LocalMeter] = OrderedDict()

    def __len__(self) -> int:
        return len(self._meters)

    def get(self, meter_id: str) -> LocalMeter:
        """This one, made where it is not known."""
        meter = self._meters.get(meter_id)
        if meter is None:
            self._make_room()
            meter = self._meters[meter_id] = LocalMeter()
        else:
            self._meters.move_to_end(meter_id)
        return meter

    def _make_room(self) -> None:
        for _ in range(len(self._meters)):
            if len(self._meters) < self._most:
                return
            oldest, meter = next(iter(self._meters.items()))
            if meter.num_open:
                self._meters.move_to_end(oldest)
            else:
                del self._meters[oldest]
