"""`python -m bench NAME`: parses the command line, runs one bench, prints its JSON line last."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import FrameType

import uvloop

from bench import (
    docs,
    engine,
    failover,
    gateway,
    kv_evict,
    kv_levers,
    kv_resume,
    kv_share,
    kv_slow_redis,
    kv_type,
    kv_wire,
    kv_write,
    limits,
    overload,
    peers,
    report,
    routing,
    routing_decision,
    routing_live,
    scheduler,
    shared_prefix,
    split,
)
from bench.errors import BenchFault
from bench.machine import warn_if_busy
from bench.report import Run

_EXAMPLE = """examples:
  python -m bench engine --quick
  python -m bench peers llama-server
  python -m bench docs --check

The last line on standard output is one JSON object {bench, figures, goals, missed}; progress goes to
standard error. Exit status: 0 measured (missed goals are listed, not punished), 1 could not measure.
"""


_BENCHES = {
    "engine": "the embedded engine against llama-server",
    "shared-prefix": "chats with one system prompt against llama-server",
    "gateway": "the gateway against LiteLLM's proxy",
    "scheduler": "the engine's own time a step as the batch grows",
    "routing": "routing policies side by side on public traces, on virtual time",
    "router": "what one choice of a worker takes, and what the directory weighs",
    "routing-live": "routing policies side by side, before workers near saturation",
    "failover": "workers killed and stopped at random under streams that must not notice",
    "limits": "limits that two gateways share, what they cost, and books that add up",
    "overload": "twice as much asked for as can be answered, against a first-come front",
    "split": "prefill and decode workers against as many that do both",
    "kv-resume": "chats after their worker was killed: KV from Redis against computing it",
    "kv-share": "two workers with one Redis against one with all the memory",
    "kv-wire": "values to and from Redis against redis-py and redis-benchmark",
    "kv-evict": "what a full Redis holds of chains, our TTLs against LRU",
    "kv-slow-redis": "what a slow or dead Redis costs a request, and how soon it is used again",
    "kv-levers": "what each way of making a fetch cheaper brings",
    "kv-type": "KV formats: bytes, speed, quality",
    "kv-write": "what writing KV behind costs the answers being made",
}

_ALONE = ("scheduler", "split", "routing", "router", "failover", "routing-live", "overload", "limits")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Antiphon against its peers, side by side.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, text in _BENCHES.items():
        bench = names.add_parser(name, help=text, epilog=f"example: python -m bench {name} --quick")
        bench.add_argument("--quick", action="store_true", help="minutes; for CI, not for the record")
        if name in ("engine", "shared-prefix"):
            bench.add_argument("--llama-server", metavar="PATH", help="its binary (see `bench peers`)")
            bench.add_argument(
                "--threads", type=int, default=os.cpu_count(), metavar="N", help="of both sides (all cores)"
            )
        if name == "engine":
            bench.add_argument(
                "--variant", action="append", choices=engine.VARIANTS, help="only this one; may be repeated"
            )
            bench.add_argument("--tuned", type=Path, metavar="PATH", help="tuned weights, without variant a")
        if name == "routing":
            folder = os.environ.get("ANTIPHON_TRACES")
            bench.add_argument(
                "--traces",
                type=Path,
                default=Path(folder) if folder else None,
                metavar="DIR",
                help="where the traces lie (ANTIPHON_TRACES)",
            )
    peer = names.add_parser("peers", help="build or install a peer", epilog="example: … peers litellm")
    peer.add_argument("peer", choices=("llama-server", "litellm"))
    page = names.add_parser("docs", help="write docs/benchmarks.md", epilog="example: … docs --check")
    page.add_argument("--check", action="store_true", help="only fail if it is stale")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    args = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if args.name == "peers":
            print(peers.install(args.peer))
        elif args.name == "docs":
            return _docs(check=args.check)
        else:
            warn_if_busy()
            print(uvloop.run(_bench_and_store(args)).last_line())
    except BenchFault as fault:
        print(f"bench: {fault}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    return 0


async def _bench_and_store(args: argparse.Namespace) -> Run:
    """Run the bench and store it: what is done of it already, should it be broken off."""
    run: Run | None = None
    async for run in _bench(args):
        path = report.store(run, is_full=not args.quick and not getattr(args, "variant", None))
        print(f"bench: stored {path}", file=sys.stderr)
    if run is None:
        raise BenchFault("nothing was measured")
    return run


async def _bench(args: argparse.Namespace) -> AsyncIterator[Run]:
    """Run the bench; a long one yields its run after each of its parts."""
    quick: bool = args.quick
    if args.name in _ALONE:
        yield await _lone_bench(args)
        return
    if args.name == "gateway":
        lanes = gateway.Settings.quick() if quick else gateway.Settings()
        yield await gateway.GatewayBench(lanes, peers.find_litellm()).run(is_quick=quick)
        return
    if args.name.startswith("kv-"):
        yield await _kv_bench(args.name, is_quick=quick)
        return
    binary, threads = peers.find_llama_server(args.llama_server), args.threads
    if args.name == "engine":
        counts = engine.Settings.quick(threads) if quick else engine.Settings(threads=threads)
        bench = engine.EngineBench(counts, binary, args.tuned)
        async for run in bench.run(args.variant or engine.VARIANTS, is_quick=quick):
            yield run
        return
    chat = shared_prefix.Settings.quick(threads) if quick else shared_prefix.Settings(threads=threads)
    yield await shared_prefix.run(chat, binary, is_quick=quick)


async def _lone_bench(args: argparse.Namespace) -> Run:
    """A bench without a peer."""
    quick: bool = args.quick
    if args.name == "scheduler":
        steps = scheduler.Settings.quick() if quick else scheduler.Settings()
        return scheduler.run(steps, is_quick=quick)
    if args.name == "split":
        roles = split.Settings.quick() if quick else split.Settings()
        return await split.run(roles, is_quick=quick)
    if args.name == "routing":
        replays = routing.Settings.quick() if quick else routing.Settings()
        return routing.run(replays, args.traces, is_quick=quick)
    if args.name == "router":
        choices = routing_decision.Settings.quick() if quick else routing_decision.Settings()
        return routing_decision.run(choices, is_quick=quick)
    if args.name == "failover":
        faults = failover.Settings.quick() if quick else failover.Settings()
        return await failover.run(faults, is_quick=quick)
    if args.name == "limits":
        bounds = limits.Settings.quick() if quick else limits.Settings()
        return await limits.run(bounds, is_quick=quick)
    if args.name == "overload":
        rush = overload.Settings.quick() if quick else overload.Settings()
        return await overload.run(rush, is_quick=quick)
    live = routing_live.Settings.quick() if quick else routing_live.Settings()
    return await routing_live.run(live, is_quick=quick)


async def _kv_bench(name: str, *, is_quick: bool) -> Run:
    if name == "kv-resume":
        chats = kv_resume.Settings.quick() if is_quick else kv_resume.Settings()
        return await kv_resume.ResumeBench(chats, chats.chats()).run(is_quick=is_quick)
    if name == "kv-wire":
        values = kv_wire.Settings.quick() if is_quick else kv_wire.Settings()
        return await kv_wire.run(values, is_quick=is_quick)
    if name == "kv-evict":
        turns = kv_evict.Settings.quick() if is_quick else kv_evict.Settings()
        return await kv_evict.run(turns, is_quick=is_quick)
    if name == "kv-slow-redis":
        faults = kv_slow_redis.Settings.quick() if is_quick else kv_slow_redis.Settings()
        return await kv_slow_redis.run(faults, is_quick=is_quick)
    if name == "kv-levers":
        levers = kv_levers.Settings.quick() if is_quick else kv_levers.Settings()
        return await kv_levers.run(levers, is_quick=is_quick)
    if name == "kv-type":
        formats = kv_type.Settings.quick() if is_quick else kv_type.Settings()
        return kv_type.run(formats, is_quick=is_quick)
    if name == "kv-share":
        shares = kv_share.Settings.quick() if is_quick else kv_share.Settings()
        return await kv_share.run(shares, is_quick=is_quick)
    writes = kv_write.Settings.quick() if is_quick else kv_write.Settings()
    return await kv_write.run(writes, is_quick=is_quick)


def _docs(*, check: bool) -> int:
    runs = report.stored()
    if not check:
        docs.write(runs)
    elif docs.is_stale(runs):
        print("bench: docs/benchmarks.md is stale; run `python -m bench docs`", file=sys.stderr)
        return 1
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
