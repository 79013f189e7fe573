"""A stand-in for a worker's `/kv` pages, on loopback, and the tag of a state folder's tenant."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from antiphon.cli.state import standing_secret, state_folder
from antiphon.core.scope import ScopeMaker
from antiphon.kv.keys import scope_tag
from antiphon.kv.stats import KvStats
from antiphon.worker.kvinfo import KvHeld, KvInfo

SECRET = "a secret of workers and gateways"


def local_tag(state_home: Path) -> bytes:
    """The tag of the blocks of tenant `local`, with $XDG_STATE_HOME there."""
    file = state_folder({"XDG_STATE_HOME": str(state_home)}) / "scope-secret"
    return scope_tag(ScopeMaker(standing_secret(file)).tenant_part("local"))


def make_info(worker: str = "worker-1", namespace: bytes = b"namespc1", block_tokens: int = 4) -> KvInfo:
    """What a worker says of itself; of its prompts' blocks half need not be computed."""
    stats = KvStats(
        num_lookups=5,
        num_local=10,
        num_host=20,
        num_store=20,
        num_computed=50,
        host_hit_bytes=0,
        store_hit_bytes=0,
        saved_s=1.5,
    )
    return KvInfo(
        worker=worker, model="scripted", namespace=namespace.hex(), block_tokens=block_tokens, stats=stats
    )


@contextmanager
def worker_pages(info: KvInfo | KvHeld, held: KvHeld | None = None) -> Iterator[str]:
    """The URL of a worker that answers those who know `SECRET`."""
    pages = {
        "/kv": msgspec.json.encode(info),
        "/kv/held": msgspec.json.encode(held or KvHeld(engine=[], host=[])),
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.headers.get("Authorization") == f"Bearer {SECRET}"
            body = pages.get(self.path) if is_known else None
            self.send_response(200 if body is not None else 403 if not is_known else 404)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
