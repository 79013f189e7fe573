"""Pairs, the shared-prefix count, floors, scheduler cost, peers and the command line of the benches."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import msgspec
import pytest
from bench import commands, peers, scheduler, shared_prefix
from bench.__main__ import main
from bench.commands import Shape
from bench.engine import busy_neighbour, short_name
from bench.errors import BenchFault
from bench.floors import product_flops
from bench.pairs import Pairs, in_pairs
from bench.shared_prefix import num_distinct
from hypothesis import given
from hypothesis import strategies as st


async def test_pairs_take_turns_at_going_first() -> None:
    """Both sides see every pair's seed, and neither is always first."""
    order: list[str] = []

    async def side(name: str, seed: int) -> float:
        order.append(f"{name}{seed}")
        return 1.0

    pairs = await in_pairs(3, lambda seed: side("a", seed), lambda seed: side("b", seed))
    assert order == ["a0", "b0", "b1", "a1", "a2", "b2"]
    assert len(pairs.ours) == len(pairs.peer) == 3


def test_ratio_is_the_median_over_pairs() -> None:
    """Each pair makes its own ratio; one bad pair does not decide."""
    assert Pairs([1.0, 2.0, 30.0], [2.0, 2.0, 2.0]).ratio(lambda x: x) == 1.0
    assert math.isnan(Pairs([1.0], [0.0]).ratio(lambda x: x))


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=8))
def test_distinct_tokens_are_the_distinct_prefixes(prompts: list[list[int]]) -> None:
    """A token is distinct once per different text up to and with it."""
    prefixes = {tuple(prompt[: end + 1]) for prompt in prompts for end in range(len(prompt))}
    assert num_distinct(prompts) == len(prefixes)


def test_chats_of_a_pair_share_the_system_prompt_and_pairs_do_not() -> None:
    """Every pair is cold: it has a system prompt of its own, of the asked length."""
    settings = shared_prefix.Settings(threads=1)
    first, second = settings.turns(0), settings.turns(1)
    assert len(first) == 32
    assert len({system for system, _ in first}) == 1
    assert len({user for _, user in first}) == 32
    assert first[0][0] != second[0][0]
    assert len(first[0][0].split()) == 600


def test_chats_arrive_within_a_second() -> None:
    """All chats are due within the asked time, in order."""
    due_s = [request.at_s for request in shared_prefix.Settings(threads=1).load("m", 3)]
    assert due_s == sorted(due_s)
    assert due_s[-1] <= 1.0


def test_step_cost_is_measured_without_the_runner() -> None:
    """A batch costs time of its own, and less than a tenth of a second."""
    assert 0 < scheduler.step_cost_s(16, 20) < 0.1


def test_product_speed_is_positive() -> None:
    """The yardstick is a speed."""
    assert product_flops(16, 64, 64) > 0


def test_busy_neighbour_ends_with_its_block() -> None:
    """The neighbour does not outlive the measurement, even a failed one."""
    with pytest.raises(ZeroDivisionError), busy_neighbour() as process:
        assert process.poll() is None
        raise ZeroDivisionError
    assert process.poll() is not None


def test_long_file_names_are_shortened_to_their_end() -> None:
    """A tuned file's digest does not fill the table; its format stays."""
    assert short_name(Path("/x/model.gguf")) == "model.gguf"
    assert short_name(Path("/x") / ("0" * 64 + "-BF16-0.3.36.gguf")) == "…0000000-BF16-0.3.36.gguf"


def test_llama_server_is_found_by_name_then_environment_then_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The given path wins; without any the error says how to build it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ANTIPHON_BENCH_LLAMA_SERVER", raising=False)
    with pytest.raises(BenchFault, match="python -m bench peers llama-server"):
        peers.find_llama_server(None)
    cached = tmp_path / "antiphon" / "peers" / "llama-server" / "llama-server"
    cached.parent.mkdir(parents=True)
    named, given_path = tmp_path / "named", tmp_path / "given"
    for path in (cached, named, given_path):
        path.touch()
    assert peers.find_llama_server(None) == cached
    monkeypatch.setenv("ANTIPHON_BENCH_LLAMA_SERVER", str(named))
    assert peers.find_llama_server(None) == named
    assert peers.find_llama_server(str(given_path)) == given_path


def test_llama_server_gets_the_same_shape() -> None:
    """Slots, context of all slots together, threads, and no prompt cache where it is switched off."""
    shape = Shape(num_streams=16, context_tokens=512, threads=2)
    argv = commands.llama_server(Path("b"), Path("m"), shape, commands.UNIFIED, cache_mib=0).argv
    pairs = dict(itertools.pairwise(argv))
    assert (pairs["--parallel"], pairs["--ctx-size"], pairs["--threads"]) == ("16", "8192", "2")
    assert pairs["--cache-ram"] == "0"
    assert "--kv-unified" in argv


def test_command_line_runs_a_bench_and_ends_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scheduler bench end to end: stored, and one JSON object as the last line."""
    monkeypatch.setattr("bench.report.store.__kwdefaults__", {"folder": tmp_path})
    monkeypatch.setattr("bench.scheduler.Settings.quick", lambda: scheduler.Settings(1, 10))
    assert main(["scheduler", "--quick"]) == 0
    line = msgspec.json.decode(capsys.readouterr().out.splitlines()[-1])
    assert line["bench"] == "scheduler"
    assert set(line["figures"]) == {"cost_128_of_16", "cost_16_of_1"}
    assert (tmp_path / "scheduler.tmp").is_file()


def test_command_line_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing peer is one message and exit status 1, not a traceback."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("bench.__main__.warn_if_busy", lambda: 0.0)
    assert main(["gateway", "--quick"]) == 1
    assert "python -m bench peers litellm" in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` shows a command that can be copied."""
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "python -m bench engine --quick" in capsys.readouterr().out
