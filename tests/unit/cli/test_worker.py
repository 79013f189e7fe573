"""What `antiphon worker` makes of its options about leases."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.cli import worker
from antiphon.cli.main import main
from antiphon.cli.worker import parser
from antiphon.core.errors import BadRequest

CONTROL = ("--control-redis", "redis://control:6379")


@pytest.fixture
def secret(tmp_path: Path) -> str:
    """A file with a secret."""
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    return str(file)


def _lease(*arguments: str) -> worker.LeaseSettings | None:
    return worker._lease(parser().parse_args(["--secret-file", "secret", *arguments]))


@pytest.fixture(autouse=True)
def no_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing from the environment of whoever runs the tests."""
    monkeypatch.delenv("ANTIPHON_CONTROL_REDIS_URL", raising=False)


def test_without_control_redis_there_is_no_lease() -> None:
    """Whatever host it listens on."""
    assert _lease() is None
    assert _lease("--host", "0.0.0.0") is None


def test_address_is_the_hosts_unless_another_is_advertised() -> None:
    """None: the process knows its port only once it listens."""
    lease = _lease("--host", "10.0.0.7", *CONTROL)
    assert lease is not None
    assert lease.advertise is None
    lease = _lease("--host", "0.0.0.0", "--advertise", "https://w1.example:443", *CONTROL)
    assert lease is not None
    assert lease.advertise == "https://w1.example:443"


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_every_address_is_none_to_advertise(
    host: str, secret: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that says what is missing, before a model is loaded."""
    arguments = ["worker", "--model", "scripted", "--secret-file", secret, "--host", host, *CONTROL]
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert "add --advertise http://HOST:PORT" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("url", ["10.0.0.7:8100", "ftp://h", "http://h/there", "http://" + 600 * "h"])
def test_address_that_is_none_is_refused(url: str) -> None:
    """As a gateway would refuse it."""
    with pytest.raises(BadRequest):
        _lease("--advertise", url, *CONTROL)


@pytest.mark.parametrize(
    ("arguments", "is_out_of_reach"),
    [
        (CONTROL, True),
        ((*CONTROL, "--host", "10.0.0.7"), False),
        ((*CONTROL, "--advertise", "http://10.0.0.7:1"), False),
        ((*CONTROL, "--host", "0.0.0.0", "--advertise", "http://localhost:1"), True),
        (("--control-redis", "redis://127.0.0.1:6379"), False),
        (("--control-redis", "unix:///run/control.sock"), False),
    ],
)
def test_loopback_address_in_a_shared_redis_is_noticed(
    arguments: tuple[str, ...], is_out_of_reach: bool
) -> None:
    """Gateways on other machines would call themselves."""
    args = parser().parse_args(["--secret-file", "secret", *arguments])
    lease = worker._lease(args)
    assert lease is not None
    assert worker._is_out_of_reach(lease, args.host) is is_out_of_reach
