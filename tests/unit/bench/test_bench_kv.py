"""The KV benches: their servers, their loads, the figures they make of what was measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import psutil
import pytest
from bench import commands, kv_resume, kv_share, kv_write
from bench.client import Answer, Target
from bench.commands import Shape, Tiers
from bench.conversations import Reply, Scored
from bench.errors import BenchFault
from bench.kv_resume import Part, ResumeBench, Turn
from bench.metrics import linked, metric, num_computed
from bench.redisserver import redis_server
from bench.servers import Command, Server

from support.redisserver import find_redis

METRICS = b"""# HELP antiphon_prefill_tokens_total Prompt tokens computed.
# TYPE antiphon_prefill_tokens_total counter
antiphon_prefill_tokens_total 1234.0
antiphon_prefill_tokens_created 1.7e9
antiphon_worker_up{worker="a"} 1.0
antiphon_worker_up{worker="b"} 1.0
"""
SCRAPE = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(METRICS) + METRICS


def reply(token: str, ttft_s: float, num_prompt_tokens: int = 100, gap: float = 0.1) -> Reply:
    """An answer of one token, with `x` and `y` as its alternatives."""
    answer = Answer(0.0, ttft_s, ttft_s, 200, 1, num_prompt_tokens, 1)
    top = {token: -0.5, "x": -0.5 - gap, "y": -0.5 - gap} | {token: -0.5}
    return Reply(answer, token, [Scored(token, -0.5, top)])


def part(num_computed: int, **replies: Reply) -> Part:
    """A worker's part of a turn; chats are named c0, c1, …"""
    return Part({int(name[1:]): one for name, one in replies.items()}, num_computed)


def resumed_bench(*turns: Turn) -> ResumeBench:
    """A bench that has measured these turns."""
    settings = kv_resume.Settings.quick()
    bench = ResumeBench(settings, settings.chats())
    for turn in turns:
        bench.add(turn)
    return bench


def figures(bench: ResumeBench) -> dict[str, float | None]:
    """The figures of its report, by name."""
    return {f.name: f.value for f in bench.report(is_quick=True).figures}


async def test_metrics_are_summed_by_name(
    playback: Callable[[Sequence[bytes]], AbstractAsyncContextManager[Target]],
) -> None:
    """Labels are ignored, names are not cut, and a metric that is not there is a fault."""
    async with playback([SCRAPE]) as target:
        server = Server(Command("fake", [], target.url, "/"), psutil.Process())
        assert await num_computed(server) == 1234
        assert await metric(server, "antiphon_worker_up") == 2.0
        await linked(server)
        with pytest.raises(BenchFault, match="fake's /metrics has no antiphon_worker"):
            await metric(server, "antiphon_worker")


async def test_redis_is_started_as_the_product_wants_it() -> None:
    """On a unix socket, evicting what ends soonest, nothing on disk, empty; gone afterwards."""
    find_redis()
    async with redis_server(64) as store:
        argv = list(store.server.command.argv)
        assert store.url == f"unix://{store.socket}"
        assert store.num_keys() == 0
        assert store.used_bytes() > 0
        root = store.server.root
    assert dict(itertools.pairwise(argv))["--maxmemory-policy"] == "volatile-ttl"
    assert dict(itertools.pairwise(argv))["--maxmemory"] == "64mb"
    assert not root.is_running()


async def test_a_machine_without_redis_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No binary is one message."""
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(BenchFault, match="apt-get install redis-server"):
        async with redis_server(64):
            pass


def test_a_fleet_shares_a_secret_and_a_state_folder_of_its_own(tmp_path: Path) -> None:
    """Worker and gateway get the same secret and state folder; a worker is told its tiers."""
    shape = Shape(num_streams=4, context_tokens=512, threads=None, kv_tokens=4096)
    with commands.fleet("smollm2") as fleet:
        worker = fleet.worker(shape, tiers=Tiers("unix:///s", 64))
        gateway = fleet.gateway(worker)
        plain = fleet.worker(shape)
        assert (fleet.folder / "secret").stat().st_mode & 0o077 == 0
    given = dict(itertools.pairwise(worker.argv))
    assert (given["--redis"], given["--kv-host-mib"], given["--kv-tokens"]) == ("unix:///s", "64", "4096")
    assert given["--secret-file"] == dict(itertools.pairwise(gateway.argv))["--secret-file"]
    assert dict(itertools.pairwise(gateway.argv))["--worker"] == worker.url
    assert worker.env == gateway.env == {"XDG_STATE_HOME": str(fleet.folder)}
    assert "--redis" not in plain.argv
    assert not fleet.folder.exists()


@pytest.mark.parametrize("settings", [kv_resume.Settings(), kv_resume.Settings.quick()])
def test_histories_stay_within_what_was_asked(settings: kv_resume.Settings) -> None:
    """First turns begin at 1,000 tokens; the longest chat stays below 3,000 and the context."""
    chats = settings.chats()
    words = [sum(len(turn.split()) for turn in chat.user_turns) for chat in chats]
    answers = settings.num_turns * chats[0].answer_tokens
    assert len(chats[0].user_turns[0].split()) == 1000
    assert max(words) + answers + 20 * settings.num_turns < 3000 < settings.context_tokens
    assert sum(map(settings.is_paired, range(len(chats)))) >= 2


def test_resume_compares_the_same_requests_and_counts_what_was_computed() -> None:
    """TTFT of pairs, not of all chats; reused is what the worker did not compute."""
    turn = Turn(
        part(20, c0=reply("x", 0.1), c1=reply("x", 9.0)),
        part(200, c0=reply("x", 1.0)),
        part(5, c0=reply("x", 0.1)),
        num_reusable=192,
    )
    found = figures(resumed_bench(turn, turn))
    assert found["ttft_p50"] == found["ttft_pairs"] == pytest.approx(0.1)
    assert found["reused"] == pytest.approx(180 / 192, abs=1e-4)
    assert (found["texts_wrong"], found["texts_equal"]) == (0, 1)


@pytest.mark.parametrize(("gap", "num_wrong"), [(0.1, 0), (4.0, 1)])
def test_resume_forgives_near_ties_and_lists_every_difference(gap: float, num_wrong: int) -> None:
    """A difference is listed with its gap, and counts as wrong only beyond a near-tie."""
    turn = Turn(
        part(0, c0=reply("x", 0.1, gap=gap)),
        part(0, c0=reply("y", 1.0)),
        part(0, c0=reply("y", 0.1)),
        num_reusable=1,
    )
    bench = resumed_bench(turn)
    found = figures(bench)
    assert (found["texts_wrong"], found["texts_equal"]) == (num_wrong, 0)
    row = bench.raw["turn 2, chat 1: resumed differs from without a kill"]
    assert row == {"at token": 1, "gap, nats": pytest.approx(gap)}
    assert not any("recomputed differs" in name for name in bench.raw)


def test_share_is_what_was_not_computed() -> None:
    """The share of prompt tokens that the workers' counters do not show."""
    assert kv_share.Measured(1000, 250, 0.1).spared == 0.75


def test_shares_chats_fit_the_memory_of_one_side() -> None:
    """Nothing is lost for want of room: the one worker keeps every chat of a pair."""
    settings = kv_share.Settings()
    chats = settings.chats(0)
    words = sum(len(turn.split()) for chat in chats for turn in chat.user_turns)
    overhead = (20 + chats[0].answer_tokens) * settings.num_turns * len(chats)
    assert words + overhead < settings.kv_tokens
    assert chats[0].user_turns[0] != settings.chats(1)[0].user_turns[0]


def test_a_load_writes_its_whole_blocks() -> None:
    """213 positions of a stream are six blocks of 32."""
    assert kv_write.Settings().num_blocks == 8 * 6
