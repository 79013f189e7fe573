"""A loopback server that answers Redis commands with whatever bytes a test likes.

For what a real server cannot be made to do: half replies, lies about lengths, errors at will.
"""

from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Command = tuple[bytes, ...]


@dataclass
class ScriptedRedis:
    """`answer` maps a command to the bytes of its reply; None hangs up after what was sent.

    `HANG` anywhere in the bytes: say no more from there on, and keep the connection open.
    """

    answer: Callable[[Command], bytes | None]
    url: str = ""
    commands: list[Command] = field(default_factory=list)
    num_connections: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)

    def hang_up(self) -> None:
        """End every connection that hangs, now and later."""
        self._ended.set()


HANG = b"\0hang\0"


@contextlib.contextmanager
def scripted_redis(answer: Callable[[Command], bytes | None]) -> Iterator[ScriptedRedis]:
    """Listen inside the block."""
    script = ScriptedRedis(answer)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            script.num_connections += 1
            with contextlib.suppress(ConnectionError):
                while (command := self._command()) is not None:
                    script.commands.append(command)
                    reply = script.answer(command)
                    if reply is None:
                        return
                    said, hang, _ = reply.partition(HANG)
                    self.wfile.write(said)
                    if hang:
                        script._ended.wait()
                        return

        def _command(self) -> Command | None:
            head = self.rfile.readline()
            if not head:
                return None
            args = []
            for _ in range(int(head[1:])):
                size = int(self.rfile.readline()[1:])
                args.append(self.rfile.read(size))
                self.rfile.read(2)
            return tuple(args)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as server:
        script.url = f"redis://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
        thread.start()
        try:
            yield script
        finally:
            script.hang_up()
            server.shutdown()
            thread.join()
