"""A server's certificate: when it is loaded anew, when it is kept, and when it ends."""

from __future__ import annotations

import contextlib
import datetime
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import BadRequest
from antiphon.net.certificate import WARN_S, CertificateFiles, ServerCertificate, trusting
from antiphon.net.notafter import BadCertificate, not_after
from support.lines import Lines
from support.redisserver import Certificates, make_certificates


class Wall:
    """The time of day, which a test moves."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Certificates, Certificates]:
    """Two authorities, each with a pair."""
    return tuple(make_certificates(tmp_path_factory.mktemp("made")) for _ in range(2))  # type: ignore[return-value]  # two


@pytest.fixture
def files(originals: tuple[Certificates, Certificates], tmp_path: Path) -> CertificateFiles:
    """The first pair, in files of this test's own."""
    made = CertificateFiles(tmp_path / "cert.pem", tmp_path / "key.pem")
    _put(originals[0], made)
    return made


def _put(made: Certificates, files: CertificateFiles) -> None:
    """New files in place of those: moved there, so that each is another one."""
    for source, target in ((made.certificate, files.certificate), (made.key, files.key)):
        beside = target.with_suffix(".new")
        shutil.copyfile(source, beside)
        beside.replace(target)


def _shown(certificate: ServerCertificate) -> bytes:
    """What a client that connects now is shown: a handshake in memory."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(down, up, server_hostname="localhost")
    server = certificate.context.wrap_bio(up, down, server_side=True)
    done: set[ssl.SSLObject] = set()
    while len(done) < 2:
        for side in (client, server):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                continue
    shown = client.getpeercert(binary_form=True)
    assert shown is not None
    return shown


def _der(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


async def test_new_pair_is_shown(
    files: CertificateFiles, originals: tuple[Certificates, Certificates]
) -> None:
    """Once its files are there a new pair is shown, its end is told; unchanged files are not loaded again."""
    lines, ends = Lines(), list[float]()
    certificate = ServerCertificate(files, lines.logger(), ends.append)
    await certificate.look()
    assert _shown(certificate) == _der(originals[0].certificate)
    _put(originals[1], files)
    await certificate.look()
    await certificate.look()
    assert _shown(certificate) == _der(originals[1].certificate)
    assert len(lines.named("tls.reloaded")) == 1
    assert ends[0] == not_after(originals[0].certificate.read_text())
    assert ends[-1] == not_after(originals[1].certificate.read_text())


@pytest.mark.parametrize("wrong", ["half", "gone", "empty", "nonsense"])
async def test_bad_pair_changes_nothing(
    files: CertificateFiles, originals: tuple[Certificates, Certificates], wrong: str
) -> None:
    """The old pair is shown on, that is said once, and the next good pair is taken."""
    lines = Lines()
    certificate = ServerCertificate(files, lines.logger())
    match wrong:
        case "half":
            shutil.copyfile(originals[1].certificate, files.certificate)
        case "gone":
            files.key.unlink()
        case _:
            files.key.write_text("" if wrong == "empty" else "nonsense")
    for _ in range(3):
        await certificate.look()
        assert _shown(certificate) == _der(originals[0].certificate)
    assert len(lines.named("tls.not_reloaded")) == 1
    _put(originals[1], files)
    await certificate.look()
    assert _shown(certificate) == _der(originals[1].certificate)


async def test_end_is_said_in_time(files: CertificateFiles) -> None:
    """One warning, two weeks before."""
    ends_at = not_after(files.certificate.read_text())
    lines, wall = Lines(), Wall(ends_at - WARN_S)
    certificate = ServerCertificate(files, lines.logger(), wall=wall)
    await certificate.look()
    assert lines.named("tls.ends_soon") == []
    wall.now_s += 1
    await certificate.look()
    wall.now_s = ends_at + 1
    await certificate.look()
    assert [line["level"] for line in lines.named("tls.ends_soon")] == ["warning"]


def test_key_with_a_password_is_refused(files: CertificateFiles) -> None:
    """Nobody is asked at a terminal: the message says what is needed."""
    locked = files.key.with_name("locked.pem")
    command = f"openssl ec -aes128 -passout pass:secret -in {files.key} -out {locked}"
    subprocess.run(command.split(), check=True, capture_output=True)
    with pytest.raises(BadRequest, match="a key without a password"):
        ServerCertificate(CertificateFiles(files.certificate, locked), Lines().logger())


def test_authorities_that_are_none(tmp_path: Path) -> None:
    """A file that holds no certificate, or is not there, is named."""
    (tmp_path / "empty").touch()
    for name in ("empty", "none"):
        with pytest.raises(BadRequest, match=name):
            trusting(tmp_path / name)


@pytest.mark.parametrize("days", [1, 10_000, 30_000])
def test_ends_of_all_kinds(tmp_path: Path, days: int) -> None:
    """Times of two-digit and of four-digit years are read as OpenSSL reads them."""
    file = tmp_path / "cert.pem"
    new = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout {tmp_path}/k"
    subprocess.run(f"{new} -out {file} -subj /CN=x -days {days}".split(), capture_output=True, check=True)
    shown = subprocess.run(
        f"openssl x509 -enddate -noout -in {file}".split(), capture_output=True, check=True, text=True
    )
    end = shown.stdout.strip().removeprefix("notAfter=")
    time = datetime.datetime.strptime(end, "%b %d %H:%M:%S %Y GMT").replace(tzinfo=datetime.UTC)
    assert not_after(file.read_text()) == time.timestamp()


@given(st.data())
def test_mutilated_certificates(originals: tuple[Certificates, Certificates], data: st.DataObject) -> None:
    """Whatever was done to its bytes, reading ends in a time or in our error."""
    der = bytearray(_der(originals[0].certificate))
    for _ in range(data.draw(st.integers(1, 4))):
        der[data.draw(st.integers(0, len(der) - 1))] = data.draw(st.integers(0, 255))
    pem = ssl.DER_cert_to_PEM_cert(bytes(der[: data.draw(st.integers(0, len(der)))]))
    with contextlib.suppress(BadCertificate):
        assert isinstance(not_after(pem), float)


def test_no_certificate() -> None:
    """A file without one says so."""
    for text in ("", "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE----------BEGIN CERTIFICATE-----"):
        with pytest.raises(BadCertificate):
            not_after(text)
