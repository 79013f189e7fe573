"""TLS over real sockets: listeners, certificates that change under them, workers, serve and chat."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from antiphon.cli.kvpages import WorkerPages, WorkerSilent
from antiphon.core.catalogue import ModelEntry
from antiphon.core.errors import BadRequest
from antiphon.core.generation import Generation, StepOutput, Terminal
from antiphon.kv.redisurl import parse
from antiphon.net import certificate
from antiphon.net.certificate import CertificateFiles, trusting
from antiphon.router.dispatch import Dispatcher
from support.gateways import HELLO, MODEL, Gateway, gateway, gateway_to
from support.lines import Lines
from support.loopback import LoopbackWorker, Session, saying
from support.redisserver import Certificates, make_certificates, redis_server
from support.served import PATIENCE_S, serving, state_of_its_own
from support.workerprocess import SECRET, worker_processes

BODY = {"model": "scripted", "messages": HELLO}


@pytest.fixture
def made(tmp_path: Path) -> Certificates:
    """An authority and a pair for localhost."""
    return make_certificates(tmp_path)


def _files(made: Certificates) -> CertificateFiles:
    return CertificateFiles(made.certificate, made.key)


@contextlib.asynccontextmanager
async def _client(running: Gateway, ca: Path) -> AsyncIterator[httpx2.AsyncClient]:
    url = f"https://127.0.0.1:{running.port}"
    async with httpx2.AsyncClient(base_url=url, verify=trusting(ca), trust_env=False, timeout=20) as client:
        yield client


def _shown(port: int) -> bytes:
    """The certificate that a new connection is shown. Waits for it."""
    return ssl.PEM_cert_to_DER_cert(
        ssl.get_server_certificate(("127.0.0.1", port), timeout=PATIENCE_S)
    ).strip()


def _held(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


def _another(made: Certificates, folder: Path) -> Certificates:
    folder.mkdir()
    return make_certificates(folder)


def _put(new: Certificates, made: Certificates) -> None:
    """In place of the old pair, as certificate managers do it: each file at once, one after the other."""
    for source, target in ((new.certificate, made.certificate), (new.key, made.key)):
        beside = target.with_suffix(".new")
        shutil.copyfile(source, beside)
        beside.replace(target)


async def test_https(made: Certificates) -> None:
    """Answers and streams come over TLS; plain HTTP and old TLS get nothing, and the server lives on."""
    async with gateway(LoopbackWorker(saying("hello")), tls=_files(made)) as running:
        async with _client(running, made.ca) as client:
            response = await client.post("/v1/chat/completions", json=BODY)
            assert response.json()["choices"][0]["message"]["content"] == "hello"
            stream = await client.post("/v1/chat/completions", json=BODY | {"stream": True})
            assert stream.text.endswith("data: [DONE]\n\n")
            assert not (await running.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")).startswith(
                b"HTTP"
            )
            old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
            with pytest.warns(DeprecationWarning):
                old.maximum_version = ssl.TLSVersion.TLSv1_1
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.open_connection("127.0.0.1", running.port, ssl=old)
            metrics = (await client.get("/metrics")).text
            (line,) = [
                x for x in metrics.splitlines() if x.startswith("antiphon_tls_certificate_expiry_seconds ")
            ]
            ends_at = ssl.cert_time_to_seconds(_end_of(made.certificate))
            assert float(line.split()[1]) == ends_at
            assert running.lines.named("tls.ends_soon")  # it is good for two days
        with pytest.raises(httpx2.ConnectError):
            async with httpx2.AsyncClient(trust_env=False) as stranger:  # the system does not vouch for it
                await stranger.get(f"https://127.0.0.1:{running.port}/health")


def _end_of(path: Path) -> str:
    done = subprocess.run(
        ["openssl", "x509", "-enddate", "-noout", "-in", str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip().removeprefix("notAfter=")


async def test_new_pair_without_a_restart(
    made: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New connections see the new pair, an open stream goes on, a pair that does not fit is kept out."""
    monkeypatch.setattr(certificate, "POLL_S", 0.02)
    new = _another(made, tmp_path / "new")
    may_end = asyncio.Event()

    async def script(session: Session, generation: Generation) -> None:
        await session.send(StepOutput(generation.id, 0, 0, [ord("h")]))
        await may_end.wait()
        await session.send(StepOutput(generation.id, 0, 1, [ord("i")], Terminal.STOP))

    first = _held(made.certificate)
    async with (
        gateway(LoopbackWorker(script), tls=_files(made)) as running,
        _client(running, made.ca) as client,
        client.stream("POST", "/v1/chat/completions", json=BODY | {"stream": True}) as stream,
    ):
        lines = stream.aiter_lines()
        while '"content":"h"' not in await anext(lines):
            pass
        assert await asyncio.to_thread(_shown, running.port) == first
        made.key.write_bytes(b"nonsense")
        await running.lines.until("tls.not_reloaded")
        assert await asyncio.to_thread(_shown, running.port) == first
        _put(new, made)
        await running.lines.until("tls.reloaded")
        assert await asyncio.to_thread(_shown, running.port) == _held(new.certificate) != first
        may_end.set()
        assert '"content":"i"' in "".join([line async for line in lines])


@pytest.mark.parametrize("wrong", ["certificate", "key", "pair"])
async def test_bad_files_at_the_start(made: Certificates, tmp_path: Path, wrong: str) -> None:
    """What cannot be loaded is said before anybody is served, with the names of the files."""
    files = {
        "certificate": CertificateFiles(tmp_path / "none", made.key),
        "key": CertificateFiles(made.certificate, made.certificate),
        "pair": CertificateFiles(made.ca, made.key),
    }[wrong]
    with pytest.raises(BadRequest, match=f"--tls-cert {files.certificate}"):
        async with gateway_to(tls=files):
            pass


async def test_gateway_and_worker(made: Certificates) -> None:
    """Over TLS with a worker that the authority vouches for; without that word there is no link."""
    options = ("--model", "scripted", "--tls-cert", str(made.certificate), "--tls-key", str(made.key))
    model = ModelEntry(name="scripted", engine="scripted", context=MODEL.context)
    with state_of_its_own() as environ, worker_processes(environ, options) as (worker,):
        url = f"https://127.0.0.1:{worker.port}"
        async with gateway_to(url, secret=SECRET, models=(model,), worker_ca=made.ca) as running:
            await running.proves_alive()
            (line,) = running.lines.named("link.up")
            assert line["worker"].startswith("wss://")
        assert "certificate verify failed" in await _why_down(url)
        assert WorkerPages(url, SECRET, made.ca).info().model == "scripted"
        with pytest.raises(WorkerSilent, match="CERTIFICATE_VERIFY_FAILED"):
            WorkerPages(url, SECRET).info()


async def test_worker_that_is_found_by_its_lease(made: Certificates) -> None:
    """Its lease says https, so gateways that find it speak TLS with it."""
    options = ("--model", "scripted", "--tls-cert", str(made.certificate), "--tls-key", str(made.key))
    model = ModelEntry(name="scripted", engine="scripted", context=MODEL.context)
    with contextlib.ExitStack() as stack:
        environ = stack.enter_context(state_of_its_own())
        control = stack.enter_context(redis_server())
        environ |= {"ANTIPHON_CONTROL_REDIS_URL": control.url}
        stack.enter_context(worker_processes(environ, options))
        settings = {"control": parse(control.url), "secret": SECRET, "models": (model,)}
        async with gateway_to(worker_ca=made.ca, **settings) as running:
            (line,) = await running.lines.until("link.up")
            assert line["worker"].startswith("wss://127.0.0.1:")
            await running.proves_alive()


async def _why_down(url: str) -> str:
    """What a gateway that was not told of the authority says of this worker."""
    lines = Lines()
    task = asyncio.create_task(Dispatcher([url], SECRET, lines.logger()).run())
    try:
        reason: str = (await lines.until("link.down"))[0]["reason"]
        return reason
    finally:
        task.cancel()
        await asyncio.wait([task])


def test_serve_and_chat(made: Certificates) -> None:
    """`antiphon serve` with a certificate says https and stays well; `antiphon chat --ca` talks to it."""
    options = ("--tls-cert", str(made.certificate), "--tls-key", str(made.key))
    with serving("--model", "scripted", "--port", "0", *options) as served:
        assert served.url.startswith("https://127.0.0.1:")
        command = [sys.executable, "-m", "antiphon.cli.main", "chat", "--url", served.url]
        done = subprocess.run(
            [*command, "--ca", str(made.ca)],
            input="Good morning!",
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert (done.returncode, done.stdout.strip()) == (0, "Good morning!"), done.stderr
        done = subprocess.run(command, input="x", capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 2
        assert "certificate" in done.stderr
        assert served.stop() == 0
