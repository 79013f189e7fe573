"""Links: the bounds of a gateway that reads slowly, and who owns what. (Whole sockets: tests/e2e.)"""

from __future__ import annotations

from antiphon.core.generation import StepOutput
from antiphon.kv.events import Directory
from antiphon.worker import links
from antiphon.worker.blocknews import BlockFeed
from antiphon.worker.links import Link


def test_a_gateway_that_does_not_read_is_cut_off() -> None:
    """Outputs are merged while it is slow, and past the bound the link gives up instead of growing."""
    link = Link(BlockFeed(Directory()))
    output = StepOutput("a", 0, 0, [1])
    for _ in range(links.MAX_PENDING):
        link.put(output)
    assert not link.is_slow
    link.put(output)
    assert link.is_slow
    assert len(link.pending) == links.MAX_PENDING
