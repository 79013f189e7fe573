"""A chat server on loopback whose every byte a test decides, for clients that are synchronous."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class ChatServer:
    """What the server says, and what it was told."""

    models: bytes = b'{"object":"list","data":[{"id":"scripted","object":"model"}]}'
    status: int = 200
    chunks: Sequence[bytes] = ()
    is_endless: bool = False  # says the last chunk until the client leaves
    requests: list[dict[str, object]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    models_status: int = 200
    client_left: threading.Event = field(default_factory=threading.Event)
    url: str = ""


def says(*texts: str) -> list[bytes]:
    """The stream of an answer in these pieces."""
    deltas: list[dict[str, str]] = [{"role": "assistant"}, *({"content": text} for text in texts)]
    events = [json.dumps({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    return [f"data: {event}\n\n".encode() for event in [*events, "[DONE]"]]


@contextmanager
def serving(chat: ChatServer) -> Iterator[ChatServer]:
    """Serve `chat` inside the block."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            chat.authorizations.append(self.headers["authorization"])
            self.send_response(chat.models_status)
            self.end_headers()
            self.wfile.write(chat.models)

        def do_POST(self) -> None:
            chat.authorizations.append(self.headers["authorization"])
            chat.requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(chat.status)
            self.end_headers()
            try:
                for chunk in chat.chunks:
                    self.wfile.write(chunk)
                while chat.is_endless:
                    self.wfile.write(chat.chunks[-1])
            except (BrokenPipeError, ConnectionResetError):
                chat.client_left.set()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    chat.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield chat
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
