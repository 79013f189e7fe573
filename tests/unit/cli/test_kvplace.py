"""Which store, workers and tenants a command looks at."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from antiphon.cli import kvplace
from antiphon.cli.kvpages import WorkerPages
from antiphon.cli.kvplace import Place
from antiphon.cli.kvtenants import Tenants
from antiphon.cli.options import CommandParser
from antiphon.cli.runfolder import RunCard, run_folder
from antiphon.cli.state import standing_secret
from antiphon.core.errors import BadRequest
from antiphon.store.database import file_url
from support.kvpages import SECRET


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

    def start(
        self, port: int, redis: str | None = "unix:///run/kv.sock", scope_secret_file: str | None = None
    ) -> None:
        folder = self._stack.enter_context(run_folder(self._state))
        RunCard(
            gateway=f"http://127.0.0.1:{port}",
            workers=[f"http://127.0.0.1:{port + 1}"],
            secret_file=str(self._secret_file),
            redis=redis,
            model="scripted",
            catalogue=None,
            database=None,
            scope_secret_file=scope_secret_file,
            public_prefix_file=None,
        ).write(folder)


@pytest.fixture
def runs(tmp_path: Path, secret_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    """Starts them; their folders go with the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "antiphon").mkdir(0o700)
    with ExitStack() as stack:
        yield Runs(tmp_path / "antiphon", secret_file, stack)


def _tenants(secret_file: Path, environ: dict[str, str]) -> Tenants:
    url = file_url(Path(environ["XDG_STATE_HOME"]) / "any.db")
    return Tenants.load(url, standing_secret(secret_file))


def test_one_run_needs_no_words(runs: Runs, environ: dict[str, str], tmp_path: Path) -> None:
    """Store, workers, their secret and the tenants come from the `antiphon serve` that runs here."""
    runs.start(9000, scope_secret_file=str(tmp_path / "elsewhere"))
    place = Place(_args(), environ)
    assert place.needed_store() == place.store() == "unix:///run/kv.sock"
    assert place.workers() == [WorkerPages("http://127.0.0.1:9001", SECRET)]
    assert place.tenants().tag_of("local") == _tenants(tmp_path / "elsewhere", environ).tag_of("local")
    assert place.run is not None
    assert place.run.model == "scripted"


def test_several_runs_must_be_told_apart(runs: Runs, environ: dict[str, str]) -> None:
    """The refusal names them; --url chooses, in the form that clients use too."""
    runs.start(9000)
    runs.start(9100, "unix:///run/other.sock")
    with pytest.raises(BadRequest, match=r"--url .*9000.*9100"):
        Place(_args(), environ).store()
    place = Place(_args("--url", "http://127.0.0.1:9100/v1"), environ)
    assert place.needed_store() == "unix:///run/other.sock"
    assert [worker.url for worker in place.workers()] == ["http://127.0.0.1:9101"]
    with pytest.raises(BadRequest, match="no `antiphon serve` of yours"):
        Place(_args("--url", "http://127.0.0.1:1"), environ).store()


def test_words_go_before_the_run(runs: Runs, environ: dict[str, str], tmp_path: Path) -> None:
    """What is said counts, and only what is not said comes from the run."""
    runs.start(9000)
    assert Place(_args("--redis", "redis://there"), environ).store() == "redis://there"
    assert Place(_args(), environ | {"ANTIPHON_REDIS_URL": "redis://env"}).store() == "redis://env"
    other = tmp_path / "other"
    other.write_text("another secret of workers")
    place = Place(_args("--worker", "http://w:1", "--secret-file", str(other)), environ)
    assert place.store() == "unix:///run/kv.sock"
    assert place.workers() == [WorkerPages("http://w:1", "another secret of workers")]


def test_run_is_not_looked_for_when_all_is_said(
    runs: Runs, environ: dict[str, str], secret_file: Path, tmp_path: Path
) -> None:
    """Two runs here are no trouble for who looks at a store elsewhere."""
    runs.start(9000)
    runs.start(9100)
    words = ["--redis", "redis://there", "--worker", "http://w:1", "--secret-file", str(secret_file)]
    words += ["--database", f"sqlite:///{tmp_path}/keys.db", "--scope-secret-file", str(tmp_path / "scope")]
    place = Place(_args(*words, "--tenant", "local"), environ)
    assert (place.needed_store(), len(place.workers())) == ("redis://there", 1)
    assert _tenants(tmp_path / "scope", environ).tag_of("local").hex() in place.match()


def test_without_a_run_everything_must_be_said(environ: dict[str, str], secret_file: Path) -> None:
    """The refusals name the options; with them nothing else is needed."""
    with pytest.raises(BadRequest, match="--redis URL"):
        Place(_args(), environ).needed_store()
    with pytest.raises(BadRequest, match="--worker URL"):
        Place(_args("--redis", "redis://there"), environ).workers()
    with pytest.raises(BadRequest, match="--secret-file"):
        Place(_args("--worker", "http://w:1"), environ).workers()
    place = Place(_args("--worker", "http://w:1", "--secret-file", str(secret_file)), environ)
    assert (place.store(), place.run) == (None, None)


def test_run_without_store_says_so(runs: Runs, environ: dict[str, str]) -> None:
    """There is nothing to look into; its workers can be asked all the same."""
    runs.start(9000, None)
    place = Place(_args(), environ)
    assert place.store() is None
    with pytest.raises(BadRequest, match="9000 has no store"):
        place.needed_store()
    assert len(place.workers()) == 1
    with pytest.raises(BadRequest, match="says there is no store"):
        Place(_args(), environ | {"ANTIPHON_REDIS_URL": "none"}).needed_store()


def test_blocks_are_chosen_by_namespace_and_tenant(environ: dict[str, str]) -> None:
    """The pattern fits the keys of what was named."""
    every = Place(_args(), environ).match()
    of_namespace = Place(_args("--namespace", "00" * 8), environ).match()
    of_both = Place(_args("--namespace", "00" * 8, "--tenant", "local"), environ).match()
    assert len({every, of_namespace, of_both}) == 3
    assert "00" * 8 in of_namespace
    assert of_both.startswith(of_namespace[: of_namespace.index("?")])
    with pytest.raises(BadRequest, match="no tenant 'acme'"):
        Place(_args("--tenant", "acme"), environ).match()


@pytest.mark.parametrize("text", ["", "00", "zz" * 8, "00" * 9])
def test_bad_namespace_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its form is said."""
    with pytest.raises(SystemExit):
        _args("--namespace", text)
    assert "16 hexadecimal digits" in capsys.readouterr().err
