"""A real PostgreSQL server for tests: a data folder of its own, loopback and unix socket, passwords, TLS.

`postgres_server()` yields a running one and stops it at its end; databases in it are made in no time, so
tests share a server and take a database each. It runs as another user where we are root: PostgreSQL
refuses that. Where it is not installed the test that asks for one is skipped; with
ANTIPHON_REQUIRE_POSTGRES in the environment, as CI has it, that test fails.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.redisserver import Certificates, free_port

PATIENCE_S = 30.0
USER, PASSWORD = "antiphon", "p@ss/w:rd?"
ENCODED_PASSWORD = "p%40ss%2Fw%3Ard%3F"
_READY = "database system is ready to accept connections"
_SERVER_USERS = ("postgres", "nobody")
_FAST = ("fsync=off", "full_page_writes=off", "shared_buffers=16MB")  # safe while the machine lives


def find_postgres() -> Path:
    """The folder of its programs; where there is none the test is skipped, or fails where CI wants one."""
    in_path = shutil.which("postgres")
    if in_path is not None and (folder := Path(in_path).resolve().parent).joinpath("initdb").exists():
        return folder
    folders = Path("/usr/lib/postgresql").glob("*/bin")
    found = [folder for folder in folders if folder.joinpath("initdb").exists()]
    if not found:
        ending = pytest.fail if os.environ.get("ANTIPHON_REQUIRE_POSTGRES") else pytest.skip
        ending("needs a PostgreSQL server (apt-get install postgresql)")
    return max(found, key=lambda folder: float(folder.parent.name))


@dataclass
class PostgresServer:
    """One server. `start` may be called again after `crash` or `stop`: same place, same data."""

    programs: Path
    folder: Path
    port: int
    user: str | None  # whose processes it is; None: ours
    settings: tuple[str, ...] = ()
    log: list[str] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def pid(self) -> int:
        return self._process.pid

    def url(self, database: str, *, host: str = "127.0.0.1", query: str = "") -> str:
        """Its URL with the password, for the loopback address or any other name of it."""
        return f"postgresql://{USER}:{ENCODED_PASSWORD}@{host}:{self.port}/{database}{query}"

    def new_database(self) -> str:
        """The name of a new, empty database."""
        name = f"test_{next(self._numbers)}"
        self.sql(f"CREATE DATABASE {name} TEMPLATE template0", database="postgres")
        return name

    def sql(self, statement: str, *, database: str) -> str:
        """Run a statement; what it returned, a line a row."""
        command = [*self.psql(database), "-c", statement]
        return self._run(command, env=self.environ).stdout.strip()

    def await_sql(self, statement: str, result: str, *, database: str) -> None:
        """Ask until this is the answer."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := self.sql(statement, database=database)) != result:
            assert time.monotonic() < deadline, f"still {found!r}: {statement}"

    def psql(self, database: str) -> list[str]:
        """A command line that takes statements; `environ` holds the password."""
        options = ["-X", "-q", "-t", "-A", "-v", "ON_ERROR_STOP=1", "-U", USER]
        return [str(self.programs / "psql"), *options, "-h", str(self.folder), "-p", str(self.port), database]

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "PGPASSWORD": PASSWORD}

    def create(self) -> None:
        """Make the data folder."""
        secret = self.folder / "password"
        secret.write_text(PASSWORD)
        if self.user is not None:
            for path in (self.folder, secret):
                shutil.chown(path, self.user)
        options = ["--username", USER, f"--pwfile={secret}", "--auth=scram-sha-256", "--no-sync"]
        options += ["--encoding=UTF8", "--locale=C", "-D", str(self.folder / "data")]
        self._run([str(self.programs / "initdb"), *options], user=self.user)

    def start(self) -> None:
        self.log.clear()
        self._logged = threading.Condition()
        settings = [*_FAST, f"unix_socket_directories={self.folder}", *self.settings]
        command = [str(self.programs / "postgres"), "-D", str(self.folder / "data"), "-p", str(self.port)]
        command += [part for setting in settings for part in ("-c", setting)]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=self.folder,
            text=True,
            user=self.user,
            env={**os.environ, "LC_ALL": "C"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.await_log(_READY)

    def await_log(self, text: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until `text` stands in a line of what this process logged."""
        with self._logged:
            self._logged.wait_for(lambda: self._has(text) or not self._reader.is_alive(), timeout_s)
        assert self._has(text), f"no {text!r} in the log:\n" + "".join(self.log)

    def crash(self) -> None:
        """End all its processes at once, without a word to clients and without a last checkpoint."""
        self._end(signal.SIGQUIT)

    def stop(self) -> None:
        """End it in order, with all its connections."""
        self._end(signal.SIGINT)

    def _end(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)
        self._process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._logged:
                self.log.append(line)
                self._logged.notify_all()
        with self._logged:
            self._logged.notify_all()

    def _has(self, text: str) -> bool:
        return any(text in line for line in self.log)

    def _run(self, command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.folder, **options)
        assert done.returncode == 0, done.stderr
        return done


@contextlib.contextmanager
def postgres_server(tls: Certificates | None = None) -> Iterator[PostgresServer]:
    """A server on loopback and on a socket in its folder; with `tls` on the network it is TLS alone."""
    programs = find_postgres()
    user = next(iter(_server_users()), None) if os.getuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="antiphon-postgres-", dir="/tmp") as name:
        server = PostgresServer(programs, Path(name), free_port(), user)
        server.create()
        if tls is not None:
            server.settings = tuple(_tls_settings(server, tls))
        server.start()
        try:
            yield server
        finally:
            server.crash()


def _tls_settings(server: PostgresServer, tls: Certificates) -> Iterator[str]:
    yield "ssl=on"
    yield "listen_addresses=127.0.0.1,127.0.0.2"  # the second is not in the certificate
    for setting, source in (("ssl_cert_file", tls.certificate), ("ssl_key_file", tls.key)):
        path = server.folder / source.name
        shutil.copy(source, path)
        path.chmod(0o600)
        if server.user is not None:
            shutil.chown(path, server.user)
        yield f"{setting}={path}"
    rules = server.folder / "data" / "pg_hba.conf"
    rules.write_text("local all all scram-sha-256\nhostssl all all all scram-sha-256\n")


def _server_users() -> Iterator[str]:
    """Users that it may run as where we are root."""
    names = {line.split(":")[0] for line in Path("/etc/passwd").read_text().splitlines()}
    yield from (name for name in _SERVER_USERS if name in names)
