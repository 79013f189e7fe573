"""The form of command lines."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from antiphon.cli import options
from antiphon.core.errors import BadRequest
from antiphon.worker.build import EngineSize


def _parser() -> options.CommandParser:
    parser = options.CommandParser("antiphon test", description="d", epilog="example:\n  antiphon test")
    options.add_model_options(parser)
    options.add_listen_options(parser, 8000)
    options.add_engine_options(parser)
    options.add_process_options(parser)
    return parser


@pytest.mark.parametrize(
    "arguments",
    [
        ["--port", "x"],
        ["--port", "65536"],
        ["--port", "-1"],
        ["--context", "63"],
        ["--nope"],
        ["extra"],
        ["--mod", "m"],
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong values, unknown options and shortened names end the command with one clear line."""
    with pytest.raises(SystemExit) as end:
        _parser().parse_args(arguments)
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("antiphon test: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("text", "number"), [("1", 1), ("64", 64), ("007", 7)])
def test_whole_numbers(text: str, number: int) -> None:
    """Digits within the bounds are a number."""
    assert options.whole(1, 64)(text) == number


@pytest.mark.parametrize("text", ["0", "65", "", "1.5", "1e3", "٣", "²", "-1", "9" * 5000])
def test_other_texts_are_no_whole_numbers(text: str) -> None:
    """What is out of bounds, foreign digits and huge numbers are refused."""
    with pytest.raises(argparse.ArgumentTypeError):
        options.whole(1, 64)(text)


def test_engine_options_survive_the_way_to_a_worker() -> None:
    """What `serve` is told about the engine is what its workers are told."""
    given = ["--max-sequences", "3", "--threads", "2", "--weights", "as-is"]
    secret = ["--secret-file", "secret"]
    args = _parser().parse_args([*secret, *given])
    for num_workers in (1, 3):
        again = _parser().parse_args([*secret, *options.engine_arguments(args, num_workers)])
        assert again == args


@pytest.mark.parametrize(("cores", "num_workers", "threads"), [(8, 2, 4), (8, 3, 2), (2, 3, 1), (8, 1, None)])
def test_several_workers_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, num_workers: int, threads: int | None
) -> None:
    """Each gets its share of threads, at least one; a single worker decides by step times."""
    monkeypatch.setattr(options, "usable_cores", lambda: cores)
    args = _parser().parse_args(["--secret-file", "secret"])
    again = _parser().parse_args(["--secret-file", "secret", *options.engine_arguments(args, num_workers)])
    assert again.threads == threads


def test_default_of_max_sequences_is_the_workers() -> None:
    """The figure that help and doctor show is the one a worker uses."""
    assert EngineSize().max_sequences == options.MAX_SEQUENCES


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:1"),
        ("0.0.0.0", "http://127.0.0.1:1"),
        ("::", "http://[::1]:1"),
        ("a.b", "http://a.b:1"),
    ],
)
def test_url_of_a_server_can_be_called(host: str, url: str) -> None:
    """The URL shown is one that works, also where a server listens on all addresses."""
    assert options.base_url(host, 1) == url


def test_secret_is_read_without_its_newline(tmp_path: Path) -> None:
    """A secret file may end in a newline."""
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    assert options.read_secret(file) == "0123456789abcdef"


@pytest.mark.parametrize("content", [b"", b"short", "äääääääääääääääääää".encode()])
def test_bad_secrets_are_refused(tmp_path: Path, content: bytes) -> None:
    """Short secrets and those that cannot stand in a header are refused, without showing them."""
    file = tmp_path / "secret"
    file.write_bytes(content)
    with pytest.raises(BadRequest, match="secret") as refusal:
        options.read_secret(file)
    assert not content or content.decode() not in refusal.value.message


def test_missing_secret_file_is_named(tmp_path: Path) -> None:
    """The message says which file."""
    with pytest.raises(BadRequest, match="nowhere"):
        options.read_secret(tmp_path / "nowhere")


def _edge(*arguments: str) -> argparse.Namespace:
    parser = options.CommandParser("x", description="", epilog="")
    options.add_tls_options(parser)
    options.add_cors_option(parser)
    return parser.parse_args(arguments)


def test_edge_options_survive_the_way_to_a_gateway() -> None:
    """What `serve` was told of pages and certificates is what its gateway is told."""
    said = ["--tls-cert", "c", "--tls-key", "k", "--cors-origin", "https://a.example", "--cors-origin", "*"]
    args = _edge(*said)
    again = [*options.tls_arguments(args), *options.cors_arguments(args)]
    assert again == said
    assert options.tls_arguments(_edge()) == options.cors_arguments(_edge()) == []


def test_certificate_and_key_go_together(tmp_path: Path) -> None:
    """One alone is an error, and so is a pair that cannot be loaded; none is plain HTTP."""
    assert options.certificate_files(_edge()) is None
    for one in (("--tls-cert", "c"), ("--tls-key", "k")):
        with pytest.raises(BadRequest, match="go together"):
            options.certificate_files(_edge(*one))
    missing = str(tmp_path / "none")
    with pytest.raises(BadRequest, match=missing):
        options.certificate_files(_edge("--tls-cert", missing, "--tls-key", missing))


@pytest.mark.parametrize("option", ["--behind-proxy", "--require-key"])
def test_words_on_callers_without_a_key_are_handed_on(option: str) -> None:
    """As they were given; both together contradict each other."""
    parser = options.CommandParser("antiphon test", description="d", epilog="e")
    options.add_proxy_option(parser)
    assert options.proxy_arguments(parser.parse_args([])) == []
    assert options.proxy_arguments(parser.parse_args([option])) == [option]
    with pytest.raises(SystemExit):
        parser.parse_args(["--behind-proxy", "--require-key"])
