"""Builds the KV tiers of a worker from its settings. The only place that names their parts."""

from __future__ import annotations

from antiphon.core.clock import Clock
from antiphon.core.errors import BadRequest
from antiphon.engine.runner import ModelRunner
from antiphon.kv import mackeys
from antiphon.kv.cache import KvCache, KvCacheSettings
from antiphon.kv.codec import BlockCodec
from antiphon.kv.gate import Rates
from antiphon.kv.hosttier import HostSettings
from antiphon.kv.redisstore import open_store
from antiphon.kv.redisurl import BadStoreUrl
from antiphon.kv.store import BlockStore
from antiphon.obs.log import Logger
from antiphon.worker.kvsettings import KvSettings
from antiphon.worker.rates import TierRates


def open_tiers(
    settings: KvSettings, runner: ModelRunner, namespace: bytes, clock: Clock, log: Logger
) -> KvCache | None:
    """The tiers; None where there are none, or the runner cannot share blocks exactly. Raises BadRequest.

    A store that does not answer is no error: it is tried again when it is needed.
    """
    if settings.store_url is None and settings.host_bytes == 0:
        return None
    if not runner.shares_blocks:
        log.warning("kv.off", reason="the engine's self-test of block copies failed for this model")
        return None
    cache_settings = KvCacheSettings(
        block_tokens=runner.block_tokens,
        block_bytes=runner.block_bytes,
        host=HostSettings(settings.host_bytes),
        rates=_first_rates(runner),
    )
    return KvCache(
        cache_settings,
        _remote(settings, namespace),
        clock,
        lambda kind, detail: log.warning("kv.store", kind=kind, detail=detail),
    )


def tier_rates(kv: KvCache, runner: ModelRunner) -> TierRates:
    """What the tiers go by now, for the worker's report."""
    return TierRates(kv.rates, runner.block_bytes, kv.uses_store)


def _first_rates(runner: ModelRunner) -> Rates:
    """What the cost gate begins with: of the engine what it measured at start, if it did."""
    tokens_per_s = runner.start_prefill_tokens_per_s
    return Rates(prefill_tokens_per_s=tokens_per_s) if tokens_per_s else Rates()


def _remote(settings: KvSettings, namespace: bytes) -> tuple[BlockStore, BlockCodec] | None:
    if settings.store_url is None:
        return None
    if settings.key_file is None:
        raise BadRequest("A store for KV blocks needs a file with MAC keys: --kv-key-file.")
    try:
        keys = mackeys.load(settings.key_file)
        return open_store(settings.store_url), BlockCodec(namespace, keys)
    except (mackeys.MacKeyError, BadStoreUrl) as error:
        raise BadRequest(str(error)) from error
