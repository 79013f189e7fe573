"""F30: a process that writes keys is killed at any moment: what it acknowledged is there, the rest whole."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

from antiphon.store.database import file_url

_ROUNDS = 12
_COUNT_TENANTS = "SELECT count(*) FROM tenants WHERE name LIKE 'tenant-%'"

# Acknowledges each key once `create` has returned, as `antiphon keys create` does.
_WRITER = """
import asyncio, sys
from antiphon.store.database import Database
from antiphon.store.keys import KeyStore

async def main():
    database = await Database.open(sys.argv[1])
    store = KeyStore(database)
    for number in range(100_000):
        key, _ = await store.create(f"tenant-{sys.argv[2]}-{number}", "n")
        print(key.id, flush=True)

asyncio.run(main())
"""


def acknowledged(path: Path, round_: int, delay_s: float) -> list[str]:
    """Run the writer, kill it `delay_s` after its first acknowledgement; the ids it said in whole lines."""
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, file_url(path), str(round_)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    first = writer.stdout.readline()
    killer = threading.Timer(delay_s, writer.kill)
    killer.start()
    rest = writer.stdout.read()
    killer.join()
    writer.wait()
    writer.stdout.close()
    return [first.strip(), *(line.strip() for line in rest.splitlines(keepends=True) if line.endswith("\n"))]


def test_an_acknowledged_key_outlives_its_writer(tmp_path: Path) -> None:
    """Every id that was said is there with its tenant, after any kill, and the file is sound."""
    path = tmp_path / "keys.db"
    draw = random.Random(30)
    said: set[str] = set()
    for round_ in range(_ROUNDS):
        said.update(acknowledged(path, round_, draw.uniform(0.0, 0.25)))
        with closing(sqlite3.connect(path)) as file:
            assert file.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            joined = "SELECT k.id, t.name FROM api_keys k JOIN tenants t ON t.id = k.tenant_id"
            found = dict(file.execute(joined).fetchall())
            (num_keys,) = file.execute("SELECT count(*) FROM api_keys").fetchone()
            (num_tenants,) = file.execute(
                "SELECT count(*) FROM tenants WHERE name LIKE 'tenant-%'"
            ).fetchone()
        assert said <= found.keys()
        assert len(found) == num_keys == num_tenants  # no key without its tenant, and none without its key
    assert len(said) > _ROUNDS
