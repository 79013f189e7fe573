"""Which workers a gateway keeps links to, as leases come and go. The rules; pure.

Owns what is believed: whose lease was seen, under which address. Rules: a lease brings a link, once;
a link that is up is proof of life, whatever the leases say; a worker goes when for `GONE_AFTER_S`
together its lease was gone AND its link down. Time in which nobody could read the leases does not
count. Addresses that others gave (`--worker`) are not touched. Who a worker is, its greeting on the
link decides, not its lease.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from antiphon.core.lease import Lease

GONE_AFTER_S = 6.0


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be done about links."""

    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Known:
    """A lease that counted. `address` None: of no use to this gateway."""

    address: str | None


class Members:
    """Addresses are those of links (`link_url`). `serves`: whether this gateway offers a model; `fixed`:
    addresses that others gave."""

    def __init__(self, serves: Callable[[str], bool], fixed: Collection[str] = ()) -> None:
        self._serves = serves
        self._fixed = frozenset(fixed)
        self._known: dict[str, _Known] = {}
        self._brought: dict[str, float | None] = {}  # links that leases brought: since when all is silent

    @property
    def num_known(self) -> int:
        """Workers whose lease counted when it was last looked at."""
        return len(self._known)

    def unread(self, ids: Collection[str], up: Collection[str]) -> list[str]:
        """Whose leases must be looked at: who is new, and whose link is down.

        All but the load in a lease is the same for a worker's life, and of whose link is up the link
        knows better: so a settled fleet costs one short list a read, however large it is.
        """
        return [worker_id for worker_id in ids if not self._is_settled(worker_id, up)]

    def take(
        self,
        ids: Collection[str],
        read: Mapping[str, tuple[str, Lease] | None],
        up: Collection[str],
        now: float,
    ) -> Change:
        """After a read: `ids` are listed; `read` has, for those looked at, address and lease, or None."""
        listed = set(ids)
        for worker_id in [w for w in self._known if w not in listed or (w in read and read[w] is None)]:
            del self._known[worker_id]
        add = []
        for worker_id, found in read.items():
            if found is None:
                continue
            address, lease = found
            is_ours = self._serves(lease.info.model)
            self._known[worker_id] = _Known(address if is_ours else None)
            is_new = address not in self._fixed and address not in self._brought
            if is_ours and is_new and not lease.load.draining:
                add.append(address)
                self._brought[address] = None
        return Change(tuple(add), tuple(self._take_leave(up, now)))

    def lost_sight(self) -> None:
        """The leases could not be read: whoever is silent gets his time anew."""
        self._brought = dict.fromkeys(self._brought)

    def _is_settled(self, worker_id: str, up: Collection[str]) -> bool:
        known = self._known.get(worker_id)
        return known is not None and (known.address is None or known.address in up)

    def _take_leave(self, up: Collection[str], now: float) -> list[str]:
        leased = {known.address for known in self._known.values()}
        gone = []
        for address, since in self._brought.items():
            if address in leased or address in up:
                self._brought[address] = None
            elif since is None:
                self._brought[address] = now
            elif now - since >= GONE_AFTER_S:
                gone.append(address)
        for address in gone:
            del self._brought[address]
        return gone
