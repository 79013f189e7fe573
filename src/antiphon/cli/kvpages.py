"""A worker's `/kv` pages (worker/kvinfo.py), read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx2
import msgspec

from antiphon.net.certificate import trusting
from antiphon.worker.kvinfo import KvHeld, KvInfo

_TIMEOUT_S = 5.0

P = TypeVar("P", KvInfo, KvHeld)


class WorkerSilent(Exception):
    """A worker did not say what it was asked; the text says which and why."""


@dataclass(frozen=True, slots=True)
class WorkerPages:
    """Where one worker is, and the secret it answers to."""

    url: str
    secret: str = field(repr=False)
    ca: Path | None = None  # vouches for it at an https address; None: the system does

    def info(self) -> KvInfo:
        """Raises WorkerSilent."""
        return self._page("/kv", KvInfo)

    def held(self) -> KvHeld:
        """Raises WorkerSilent."""
        return self._page("/kv/held", KvHeld)

    def _page(self, path: str, form: type[P]) -> P:
        address = f"{self.url.rstrip('/')}{path}"
        try:
            # No proxy of the environment: the secret goes to the worker and nowhere else.
            reply = httpx2.get(
                address,
                headers={"Authorization": f"Bearer {self.secret}"},
                timeout=_TIMEOUT_S,
                trust_env=False,
                verify=trusting(self.ca),
            )
            if reply.status_code != 200:
                raise WorkerSilent(f"{address} answered {reply.status_code}")
            return msgspec.json.decode(reply.content, type=form)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise WorkerSilent(f"{address}: {error}") from error
        except msgspec.DecodeError as error:
            raise WorkerSilent(f"{address} is not of this version of Antiphon: {error}") from error
