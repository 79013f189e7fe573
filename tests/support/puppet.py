"""A small process that stands in for a gateway or worker under `antiphon serve`.

Run as a script: `python puppet.py MODE --host H --port P --supervised`. Modes:
    good    says progress and ready, answers 200 everywhere, stops on SIGTERM
    sick    the same, but answers 503
    deaf    good, but ignores SIGTERM
    quits   exits with 3 at once
    crashes ends by a signal at once
    chatty  good, and prints a line that is no event
    tells   good, and prints what $PUPPET_WORD holds
"""

from __future__ import annotations

import http.server
import os
import signal
import sys

STATUS = {"sick": 503}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(STATUS.get(sys.argv[1], 200))
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def main(mode: str, port: int) -> None:
    if mode == "quits":
        sys.exit(3)
    if mode == "crashes":
        os.kill(os.getpid(), signal.SIGKILL)
    server = http.server.HTTPServer(("127.0.0.1", port), Handler)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "deaf" else signal.SIG_DFL)
    if mode == "chatty":
        sys.stdout.write("a library says hello\n")
    if mode == "tells":
        sys.stdout.write(os.environ["PUPPET_WORD"] + "\n")
    sys.stdout.write('{"event":"progress","text":"warming up","fraction":0.5}\n')
    sys.stdout.write(f'{{"event":"ready","port":{server.server_port}}}\n')
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[sys.argv.index("--port") + 1]))
