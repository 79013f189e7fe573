"""All upstreams of one gateway: made from its catalogue, counted, closed together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from antiphon.core.catalogue import ModelEntry
from antiphon.core.clock import Clock
from antiphon.core.errors import BadRequest
from antiphon.obs.log import Logger
from antiphon.obs.metrics import UpstreamMetrics
from antiphon.router.upstream import Upstream


class Upstreams:
    """By the name of the model that each answers for."""

    def __init__(self, by_name: Mapping[str, Upstream], metrics: UpstreamMetrics) -> None:
        self.by_name = by_name
        self._metrics = metrics

    @classmethod
    def of(
        cls,
        entries: Sequence[ModelEntry],
        keys: Mapping[str, str],
        metrics: UpstreamMetrics,
        clock: Clock,
        log: Logger,
    ) -> Upstreams:
        """Those of these entries. `keys`: the environment variables that they name. Raises BadRequest."""
        upstreams = {}
        for entry in entries:
            if entry.upstream is not None:
                key = _key(entry.name, entry.upstream.api_key_env, keys)
                upstreams[entry.name] = Upstream(entry, key, metrics, clock, log)
        return cls(upstreams, metrics)

    def measure(self) -> None:
        """Bring the gauges up to date."""
        for name, upstream in self.by_name.items():
            self._metrics.in_flight.labels(name).set(upstream.num_in_flight)
            self._metrics.up.labels(name).set(not upstream.health.is_aside)

    async def close(self) -> None:
        """Close all connections."""
        for upstream in self.by_name.values():
            await upstream.close()


def _key(model: str, variable: str | None, keys: Mapping[str, str]) -> str | None:
    if variable is None:
        return None
    key = keys.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise BadRequest(f"model {model!r}: the environment variable {variable} does not hold a key")
    return key
