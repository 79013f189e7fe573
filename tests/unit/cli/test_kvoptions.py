"""Options about the KV tiers, and what they come to."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from antiphon.cli import kvoptions
from antiphon.cli.options import CommandParser
from antiphon.cli.serve import parser as serve_parser
from antiphon.cli.worker import parser as worker_parser
from antiphon.core.errors import BadRequest
from antiphon.kv import mackeys
from antiphon.worker.kvsettings import KvSettings

_MIB = 2**20


def _worker(*arguments: str) -> argparse.Namespace:
    return worker_parser().parse_args(["--secret-file", "secret", *arguments])


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment with a state folder of its own and no store."""
    return {"XDG_STATE_HOME": str(tmp_path)}


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6379/0",
        "rediss://user:password@host:6380",
        "unix:///run/redis.sock",
        "redis-sentinel://a:26379,b:26379/mymaster",
        "redis-cluster://a:7000,b:7001",
        "none",
    ],
)
def test_stores_are_urls(url: str) -> None:
    """Every kind of store that a worker can open may be named."""
    assert _worker("--redis", url).redis == url


@pytest.mark.parametrize("text", ["", "auto", "127.0.0.1:6379", "http://:secret@host", "file:///secret"])
def test_other_texts_are_refused_without_repeating_them(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2, and no password of a mistyped URL in a log."""
    with pytest.raises(SystemExit) as end:
        _worker("--redis", text)
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert "redis://" in err
    assert "secret@" not in err
    assert err.count("\n") == 1


def test_serve_may_start_a_redis_and_a_worker_may_not() -> None:
    """`auto` is a word for the one that starts processes."""
    assert serve_parser().parse_args(["--redis", "auto"]).redis == "auto"
    with pytest.raises(SystemExit):
        _worker("--redis", "auto")


@pytest.mark.parametrize(
    ("option", "environment", "chosen"),
    [
        (None, None, "auto"),
        (None, "", "auto"),
        (None, "redis://there", "redis://there"),
        (None, "none", "none"),
        ("redis://here", "redis://there", "redis://here"),
        ("none", "redis://there", "none"),
    ],
)
def test_option_goes_before_environment_before_default(
    option: str | None, environment: str | None, chosen: str
) -> None:
    """The nearest word counts."""
    environ = {} if environment is None else {"ANTIPHON_REDIS_URL": environment}
    assert kvoptions.chosen_store(option, environ, "auto") == chosen


def test_bad_environment_is_named_without_its_value() -> None:
    """A mistake in the variable is one line that says where it is."""
    with pytest.raises(BadRequest, match=r"\$ANTIPHON_REDIS_URL") as refusal:
        kvoptions.chosen_store(None, {"ANTIPHON_REDIS_URL": "http://:secret@host"}, "none")
    assert "secret" not in refusal.value.message


def test_worker_without_store_keeps_kv_in_memory(environ: dict[str, str]) -> None:
    """No store, no keys; the host tier has its share."""
    settings = kvoptions.kv_settings(_worker(), environ, 2**40)
    assert settings == KvSettings(host_bytes=1024 * _MIB)


def test_worker_with_store_has_keys_made_for_it(environ: dict[str, str], tmp_path: Path) -> None:
    """The first worker makes the key file, the next finds the same keys."""
    environ["ANTIPHON_REDIS_URL"] = "redis://host"
    settings = kvoptions.kv_settings(_worker("--kv-type", "q8_0", "--checkpoint-blocks", "3"), environ, None)
    assert settings.store_url == "redis://host"
    assert settings.key_file is not None
    assert tmp_path in settings.key_file.parents
    assert (settings.kv_type, settings.checkpoint_blocks) == ("q8_0", 3)
    keys = mackeys.load(settings.key_file)
    assert kvoptions.kv_settings(_worker(), environ, None).key_file == settings.key_file
    assert mackeys.load(settings.key_file) == keys


def test_settings_do_not_show_a_password(environ: dict[str, str]) -> None:
    """What is logged of settings may be read by others."""
    settings = kvoptions.kv_settings(_worker("--redis", "redis://:hunter2@host"), environ, None)
    assert "hunter2" not in repr(settings)


def test_unsound_key_file_is_one_line(tmp_path: Path, environ: dict[str, str]) -> None:
    """A file that others may read is refused with what to do."""
    file = tmp_path / "keys"
    mackeys.load_or_create(file)
    file.chmod(0o644)
    with pytest.raises(BadRequest, match="chmod 600"):
        kvoptions.key_file(file, environ)


@pytest.mark.parametrize(
    ("mib", "workers", "available", "expected"),
    [
        (7, 4, 2**30, 7 * _MIB),
        (0, 1, 2**40, 0),
        (None, 1, 64 * 2**30, 1024 * _MIB),
        (None, 1, 4 * 2**30, 512 * _MIB),
        (None, 2, 4 * 2**30, 256 * _MIB),
        (None, 4, None, 256 * _MIB),
    ],
)
def test_host_tier_takes_a_share_of_free_memory(
    mib: int | None, workers: int, available: int | None, expected: int
) -> None:
    """What was said counts; else an eighth for all workers together, each 1 GiB at most."""
    assert kvoptions.host_bytes(mib, workers, available) == expected


@pytest.mark.parametrize(
    ("mib", "available", "expected"),
    [
        (100, 2**40, 100 * _MIB),
        (None, 64 * 2**30, 4096 * _MIB),
        (None, 8 * 2**30, 2048 * _MIB),
        (None, 2**20, 64 * _MIB),
        (None, None, 64 * _MIB),
    ],
)
def test_redis_takes_a_share_of_free_memory(mib: int | None, available: int | None, expected: int) -> None:
    """What was said counts; else a quarter, within bounds."""
    assert kvoptions.redis_bytes(mib, available) == expected


def test_cache_options_survive_the_way_to_a_worker() -> None:
    """What `serve` is told about the cache is what its workers are told, the memory shared out."""
    args = serve_parser().parse_args(["--kv-type", "q4_0", "--checkpoint-blocks", "5"])
    again = _worker(*kvoptions.cache_arguments(args, 2, 4 * 2**30))
    assert (again.kv_type, again.checkpoint_blocks, again.kv_host_mib) == ("q4_0", 5, 256)


@pytest.mark.parametrize(
    "arguments", [["--kv-type", "f32"], ["--kv-host-mib", "-1"], ["--checkpoint-blocks", "0"]]
)
def test_bad_cache_options_are_refused(arguments: list[str]) -> None:
    """Unknown types and impossible numbers end with exit code 2."""
    parser = CommandParser("antiphon test", description="d", epilog="e")
    kvoptions.add_cache_options(parser)
    with pytest.raises(SystemExit) as end:
        parser.parse_args(arguments)
    assert end.value.code == 2


class TestControlRedis:
    """Where workers have their leases."""

    def test_option_goes_before_the_environment(self) -> None:
        """And neither means: none."""
        environ = {kvoptions.CONTROL_VARIABLE: "redis://there:1", kvoptions.REDIS_VARIABLE: "redis://kv:1"}
        here = kvoptions.control_url("redis://here:1", environ)
        assert here is not None
        assert str(here) == "here:1"
        assert str(kvoptions.control_url(None, environ)) == "there:1"
        assert kvoptions.control_url("none", environ) is None
        assert kvoptions.control_url(None, {kvoptions.REDIS_VARIABLE: "redis://kv:1"}) is None

    def test_serve_starts_one_unless_told_otherwise(self) -> None:
        """The default is auto."""
        said = serve_parser().parse_args([]).control_redis
        assert kvoptions.chosen_control(said, {}, kvoptions.AUTO) == kvoptions.AUTO
        assert kvoptions.chosen_control(said, {kvoptions.CONTROL_VARIABLE: "none"}, kvoptions.AUTO) == "none"

    def test_mistake_in_the_environment_names_the_variable(self) -> None:
        """Not the option, which nobody gave."""
        with pytest.raises(BadRequest, match=kvoptions.CONTROL_VARIABLE):
            kvoptions.control_url(None, {kvoptions.CONTROL_VARIABLE: "auto"})
