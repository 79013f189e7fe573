"""Which store and which workers a command looks at."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from antiphon.cli import kvplace
from antiphon.cli.kvplace import WorkerSilent, ask_worker, find_place, find_store
from antiphon.cli.options import CommandParser
from antiphon.cli.runfolder import RunCard, run_folder
from antiphon.core.errors import BadRequest
from antiphon.worker.kvinfo import KvHeld, KvInfo
from support.kvpages import SECRET, make_info, worker_pages


def _args(*arguments: str) -> argparse.Namespace:
    parser = CommandParser("antiphon test", description="d", epilog="e")
    kvplace.add_store_options(parser)
    kvplace.add_worker_options(parser)
    kvplace.add_choice_options(parser)
    return parser.parse_args(arguments)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment with a state folder of its own."""
    return {"XDG_STATE_HOME": str(tmp_path)}


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    """A file with the workers' secret."""
    file = tmp_path / "secret"
    file.write_text(SECRET)
    return file


class Runs:
    """`antiphon serve`s of this user, as far as other commands see them."""

    def __init__(self, state: Path, secret_file: Path, stack: ExitStack) -> None:
        self._state = state
        self._secret_file = secret_file
        self._stack = stack

    def start(self, port: int, redis: str | None = "unix:///run/kv.sock") -> None:
        folder = self._stack.enter_context(run_folder(self._state))
        RunCard(
            gateway=f"http://127.0.0.1:{port}",
            workers=[f"http://127.0.0.1:{port + 1}"],
            secret_file=str(self._secret_file),
            redis=redis,
            model="scripted",
            catalogue="/models.toml",
        ).write(folder)


@pytest.fixture
def runs(tmp_path: Path, secret_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    """Starts them; their folders go with the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "antiphon").mkdir(0o700)
    with ExitStack() as stack:
        yield Runs(tmp_path / "antiphon", secret_file, stack)


def test_one_run_needs_no_words(runs: Runs, environ: dict[str, str]) -> None:
    """Store, workers, secret and model come from the `antiphon serve` that runs here."""
    runs.start(9000)
    assert find_store(_args(), environ) == "unix:///run/kv.sock"
    place = find_place(_args(), environ)
    assert (place.store, place.workers, place.secret) == (
        "unix:///run/kv.sock",
        ("http://127.0.0.1:9001",),
        SECRET,
    )
    assert (place.model, place.catalogue) == ("scripted", Path("/models.toml"))


def test_several_runs_must_be_told_apart(runs: Runs, environ: dict[str, str]) -> None:
    """The refusal names them; --url chooses, in the form that clients use too."""
    runs.start(9000)
    runs.start(9100, "unix:///run/other.sock")
    with pytest.raises(BadRequest, match=r"--url .*9000.*9100"):
        find_store(_args(), environ)
    args = _args("--url", "http://127.0.0.1:9100/v1")
    assert find_store(args, environ) == "unix:///run/other.sock"
    assert find_place(args, environ).workers == ("http://127.0.0.1:9101",)
    with pytest.raises(BadRequest, match="no `antiphon serve` of yours"):
        find_store(_args("--url", "http://127.0.0.1:1"), environ)


def test_words_go_before_the_run(runs: Runs, environ: dict[str, str], tmp_path: Path) -> None:
    """What is said counts, and only what is not said comes from the run."""
    runs.start(9000)
    assert find_store(_args("--redis", "redis://there"), environ) == "redis://there"
    assert find_store(_args(), environ | {"ANTIPHON_REDIS_URL": "redis://env"}) == "redis://env"
    other = tmp_path / "other"
    other.write_text("another secret of workers")
    place = find_place(_args("--worker", "http://w:1", "--secret-file", str(other)), environ)
    assert (place.store, place.workers) == ("unix:///run/kv.sock", ("http://w:1",))
    assert place.secret == "another secret of workers"


def test_without_a_run_everything_must_be_said(environ: dict[str, str], secret_file: Path) -> None:
    """The refusals name the options; with them nothing else is needed."""
    with pytest.raises(BadRequest, match="--redis URL"):
        find_store(_args(), environ)
    with pytest.raises(BadRequest, match="--worker URL"):
        find_place(_args("--redis", "redis://there"), environ)
    with pytest.raises(BadRequest, match="--secret-file"):
        find_place(_args("--worker", "http://w:1"), environ)
    place = find_place(_args("--worker", "http://w:1", "--secret-file", str(secret_file)), environ)
    assert (place.store, place.workers, place.model) == (None, ("http://w:1",), "smollm2")


def test_run_without_store_says_so(runs: Runs, environ: dict[str, str]) -> None:
    """There is nothing to look into; its workers can be asked all the same."""
    runs.start(9000, None)
    with pytest.raises(BadRequest, match="9000 has no store"):
        find_store(_args(), environ)
    assert find_place(_args(), environ).store is None
    with pytest.raises(BadRequest, match="says there is no store"):
        find_store(_args(), environ | {"ANTIPHON_REDIS_URL": "none"})


def test_worker_tells_who_knows_the_secret() -> None:
    """Both pages are read in their forms."""
    info, held = make_info(), KvHeld(engine=["00"], host=[])
    with worker_pages(info, held) as url:
        assert ask_worker(url + "/", "/kv", SECRET, KvInfo) == info
        assert ask_worker(url, "/kv/held", SECRET, KvHeld) == held


@pytest.mark.parametrize(
    ("page", "secret", "words"),
    [("/kv", "not the secret", "403"), ("/kv/nothing", SECRET, "404"), ("/kv/held", SECRET, "version")],
)
def test_worker_that_tells_nothing_is_named(page: str, secret: str, words: str) -> None:
    """A refusal, a missing page, another form: each says which worker and why, never the secret."""
    with worker_pages(make_info()) as url, pytest.raises(WorkerSilent, match=words) as silence:
        ask_worker(url, page, secret, KvInfo)
    assert url in str(silence.value)
    assert secret not in str(silence.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://[", ""])
def test_worker_that_is_not_there_is_named(url: str) -> None:
    """Nobody listens, or the address is none."""
    with pytest.raises(WorkerSilent, match="/kv"):
        ask_worker(url, "/kv", SECRET, KvInfo)


def test_blocks_are_chosen_by_namespace_and_tenant(environ: dict[str, str]) -> None:
    """The pattern fits the keys of what was named."""
    every = kvplace.chosen_blocks(_args(), environ)
    of_namespace = kvplace.chosen_blocks(_args("--namespace", "00" * 8), environ)
    of_both = kvplace.chosen_blocks(_args("--namespace", "00" * 8, "--tenant", "local"), environ)
    assert len({every, of_namespace, of_both}) == 3
    assert "00" * 8 in of_namespace
    assert of_both.startswith(of_namespace[: of_namespace.index("?")])
    with pytest.raises(BadRequest, match="no tenant 'acme'"):
        kvplace.chosen_blocks(_args("--tenant", "acme"), environ)


@pytest.mark.parametrize("text", ["", "00", "zz" * 8, "00" * 9])
def test_bad_namespace_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its form is said."""
    with pytest.raises(SystemExit):
        _args("--namespace", text)
    assert "16 hexadecimal digits" in capsys.readouterr().err
