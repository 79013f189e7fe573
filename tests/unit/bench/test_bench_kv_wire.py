"""The clients and the arithmetic of `bench kv-wire`, against a real Redis."""

from __future__ import annotations

import pytest
from bench import kv_wire
from bench.errors import BenchFault
from bench.kv_wire import Case, MacCost, Meter, Outcome
from bench.pairs import Pairs
from bench.wire_sides import (
    MODES,
    Ours,
    Place,
    RedisBenchmark,
    RedisPy,
    RedisPyAsync,
    Sample,
    benchmark_key,
    sample,
)

from support.redisserver import RedisServer, redis_server

KEYS = [benchmark_key(number) for number in range(9)]
VALUE = bytes(range(256)) * 200


def place_of(server: RedisServer) -> Place:
    return Place(socket=str(server.socket_path)) if server.socket_path else Place(port=server.port)


@pytest.mark.parametrize("unix", [False, True])
async def test_every_client_moves_every_value(unix: bool) -> None:
    """What each one puts lies there, and what it gets is all of it."""
    with redis_server(unix=unix) as server, server.client() as client:
        place = place_of(server)
        sides = [Ours(place), Ours(place, 2), RedisPyAsync(place, 2), *(RedisPy(place, m) for m in MODES)]
        for side in sides:
            client.flushall()
            measured = [await sample(side, KEYS, VALUE, put=put) for put in (True, False)]
            assert [client.get(key) for key in KEYS] == [VALUE] * len(KEYS)
            assert all(one.gb_s > 0 and one.cpu_s_gb >= 0 for one in measured)
            client.delete(KEYS[4])
            with pytest.raises((BenchFault, TypeError)):
                await sample(side, KEYS, VALUE, put=False)
            await side.close()
        for put in (True, False):
            assert RedisBenchmark(place, 2).sample(9, len(VALUE), put=put, num_requests=20).gb_s > 0


TINY = kv_wire.Settings(num_pairs=2, num_sweeps=1, bytes_a_sample=1, io_threads=(1, 2))


@pytest.mark.parametrize("put", [False, True])
async def test_a_case_is_swept_then_measured_in_pairs(put: bool) -> None:
    """Every mode once, ours and the fastest of both peers as often as there are pairs."""
    with redis_server() as server, server.client() as client:
        case = Case("TCP", 1, "0.7 MiB", put)
        outcome = await Meter(TINY, case, place_of(server), client).run()
    assert len(outcome.swept) == 3 + len(MODES) + 2 + 4 - put  # MGET does not put
    assert {outcome.best_py, outcome.best_benchmark} < outcome.swept.keys()
    for pairs in (outcome.of_py, outcome.of_benchmark):
        assert (len(pairs.ours), len(pairs.peer)) == (2, 2)


def outcome_of(ours: float, py: float, benchmark: float) -> Outcome:
    """An outcome with these GB/s; CPU seconds a GB are their inverse."""

    def samples(gb_s: float) -> list[Sample]:
        return [Sample(gb_s, 1 / gb_s)]

    return Outcome(
        {"some mode": Sample(py, 1.0)},
        "some mode",
        "-c 1",
        Pairs(samples(ours), samples(py)),
        Pairs(samples(ours), samples(benchmark)),
    )


def test_figures_are_of_the_worst_size_without_io_threads() -> None:
    """A size that is slow decides; what more io-threads bring is told, not judged."""
    outcomes = {
        Case(way, threads, size, put): outcome_of(2.0 if size == "4 MiB" else 4.0, 2.0 / threads, 4.0)
        for way in ("TCP", "unix")
        for threads in (1, 2)
        for size in kv_wire.SIZES
        for put in (False, True)
    }
    macs = dict.fromkeys(kv_wire.SIZES, MacCost(0.2, 0.1))
    run = kv_wire.report(TINY, outcomes, macs, is_quick=True)
    values = {figure.name: figure.value for figure in run.figures}
    assert values["get_tcp_of_benchmark"] == values["set_unix_of_benchmark"] == 0.5
    assert values["get_unix_of_redis_py"] == values["set_tcp_of_redis_py"] == 1.0
    assert values["get_tcp_cpu_of_redis_py"] == 1.0
    assert values["mac_of_get"] == 0.4
    columns = {case.column for case in outcomes}
    assert len(columns) == 12
    for row in ("GB/s: ours", "GB/s: ours, 2 io-threads", "CPU s a GB: the MAC", "sweep, GB/s: some mode"):
        assert run.raw[row].keys() == columns
    assert run.raw["CPU s a GB: the MAC"]["SET 4 MiB, TCP"] == 0.2


def test_the_mac_is_measured() -> None:
    """Making and proving a value both take time."""
    cost = kv_wire.mac_cost(100_000, num_rounds=3)
    assert min(cost.encode_s_gb, cost.decode_s_gb) > 0
