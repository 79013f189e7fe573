"""What `antiphon serve` shows while it works: progress, notes, and the one line that says it is ready.

On a terminal progress is one line that changes; elsewhere each new step of the work is a line of its
own, so that logs stay readable. Progress and notes go to stderr, the ready line to stdout.
"""

from __future__ import annotations

import json
import shutil
import sys

from antiphon.cli.events import Progress

_CLEAR_LINE = "\r\x1b[K"


class Console:
    """Progress, notes and the ready line of one `antiphon serve`."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._is_terminal = sys.stderr.isatty()
        self._last: dict[str, str] = {}  # the last progress text by process: bounded by the processes

    def progress(self, name: str, progress: Progress) -> None:
        """Show how far a process has come."""
        text = f"{name}: {progress.text}"
        if self._is_terminal:
            percent = "" if progress.fraction is None else f" {progress.fraction:4.0%}"
            width = shutil.get_terminal_size().columns - len(percent) - 1
            # The cursor goes back to the margin: a process that logs now writes over this line.
            sys.stderr.write(f"{_CLEAR_LINE}{text[:width]}{percent}\r")
            sys.stderr.flush()
        elif self._last.get(name) != text:
            self._last[name] = text
            print(text, file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Say something in a line of its own."""
        clear = _CLEAR_LINE if self._is_terminal else ""
        print(f"{clear}{text}", file=sys.stderr, flush=True)

    def ready(self, url: str, model: str, workers: int) -> None:
        """Say that requests are answered from now on."""
        if self._is_terminal:
            sys.stderr.write(_CLEAR_LINE)
            sys.stderr.flush()
        if self._as_json:
            line = json.dumps({"event": "ready", "url": url, "model": model, "workers": workers})
        else:
            number = "1 worker" if workers == 1 else f"{workers} workers"
            line = f"Antiphon is ready at {url} (model {model}, {number}). Ctrl-C stops it."
        print(line, flush=True)
