"""Looks after a gateway's directory of blocks: workers that tell nothing, leftovers, figures.

Owns what was seen of each worker's news. A worker whose cache grows by its own report while it tells of no
block is named once in the log and for as long as it lasts in the metrics: without news it is routed to as
if it held nothing, and nobody would notice. Changes nothing about routing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from antiphon.core.clock import Clock
from antiphon.obs.log import Logger
from antiphon.obs.metrics import DirectoryMetrics
from antiphon.router.directory import BlockDirectory, DirectoryCounts
from antiphon.router.link import WorkerLink

SILENT_S = 5.0  # news come every 50 ms where there are any
_LOOK_S = 1.0


@dataclass(slots=True)
class _Seen:
    """A worker when it last told something."""

    heard_s: float
    cached_blocks: int
    grown_s: float | None = None  # since when it reports more than that
    is_silent: bool = False


class DirectoryWatch:
    """Of one directory. Call `tick` often."""

    def __init__(self, directory: BlockDirectory, clock: Clock, log: Logger) -> None:
        self._directory = directory
        self._clock = clock
        self._log = log
        self._seen: dict[int, _Seen] = {}
        self._next_look_s = clock.now()
        self._counted = DirectoryCounts()

    def tick(self, links: Iterable[WorkerLink]) -> None:
        """Clean up a little; once a second look for workers that tell nothing."""
        self._directory.tidy()
        now = self._clock.now()
        if now < self._next_look_s:
            return
        self._next_look_s = now + _LOOK_S
        before, self._seen = self._seen, {}
        for link in links:
            heard_s = self._directory.heard_s(link.replica)
            if heard_s is not None:
                self._seen[link.replica] = self._look(link, heard_s, before.get(link.replica), now)

    def measure(self, metrics: DirectoryMetrics, links: Iterable[WorkerLink]) -> None:
        """Set the figures of this moment."""
        directory = self._directory
        metrics.clear()
        now = self._clock.now()
        for link in links:
            heard_s = directory.heard_s(link.replica)
            if heard_s is not None:
                seen = self._seen.get(link.replica)
                metrics.blocks.labels(link.url).set(directory.num_blocks_of(link.replica))
                metrics.age_s.labels(link.url).set(now - heard_s)
                metrics.silent.labels(link.url).set(seen is not None and seen.is_silent)
        metrics.store_blocks.set(directory.num_stored)
        counted, counts = self._counted, dataclasses.replace(directory.counts)
        self._counted = counts
        metrics.dropped_blocks.inc(counts.num_dropped - counted.num_dropped)
        metrics.events.labels("gap").inc(counts.num_gaps - counted.num_gaps)
        metrics.events.labels("resync").inc(counts.num_resyncs - counted.num_resyncs)
        metrics.events.labels("ignored").inc(counts.num_ignored - counted.num_ignored)

    def _look(self, link: WorkerLink, heard_s: float, seen: _Seen | None, now: float) -> _Seen:
        cached_blocks = link.load.cached_blocks
        if seen is None or heard_s != seen.heard_s:
            if seen is not None and seen.is_silent:
                self._log.info("directory.news_again", worker=link.url)
            return _Seen(heard_s, cached_blocks)
        if cached_blocks <= seen.cached_blocks:
            seen.cached_blocks, seen.grown_s = cached_blocks, None
        elif seen.grown_s is None:
            seen.grown_s = now
        elif now - seen.grown_s >= SILENT_S and not seen.is_silent:
            seen.is_silent = True
            self._log.warning("directory.no_news", worker=link.url, cached_blocks=cached_blocks)
        return seen
