"""What `antiphon doctor` says about the database of tenants and keys: is it there, which one, how fast.

Changes nothing: a file is not made and a schema not brought up to date, that is for who serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from antiphon.cli.checks import Finding
from antiphon.core.errors import BadRequest, StoreUnavailable
from antiphon.store.database import Facts, look, shown_url

_SUBJECT = "database"
_SLOW_RTT_S = 20e-3


def check_database(url: str) -> Iterator[Finding]:
    """Findings on the database at `url`. Raises BadRequest where that is none."""
    shown = shown_url(url)
    try:
        facts = asyncio.run(look(url))
    except StoreUnavailable as error:
        advice = "Is it running, and does the URL name it, with user and password?"
        yield Finding("fail", _SUBJECT, f"{shown} cannot be used: {error.detail}", advice)
        return
    except BadRequest as error:
        yield Finding("fail", _SUBJECT, f"{shown}: {error.message}")
        return
    if facts is None:
        yield Finding("ok", _SUBJECT, f"{shown} is made at the first start")
    else:
        yield from check_facts(shown, facts)


def check_facts(shown: str, facts: Facts) -> Iterator[Finding]:
    """One database's version, schema and round trip."""
    text = f"{shown}: {facts.name} {facts.version}, round trip {1e3 * facts.rtt_s:.1f} ms"
    if facts.rtt_s > _SLOW_RTT_S:
        advice = "Keys are remembered for seconds, but bring it nearer: new keys and usage wait for it."
        yield Finding("warn", _SUBJECT, f"slow: {text}", advice)
    else:
        yield Finding("ok", _SUBJECT, text)
    if facts.schema is None:
        yield Finding("ok", _SUBJECT, "it is empty: tables are made at the first start")
    elif facts.is_newer:
        advice = "Update Antiphon here: an older one does not touch what it does not know."
        yield Finding("fail", _SUBJECT, f"a newer Antiphon made its schema, {facts.schema}", advice)
    else:
        text = f"schema {facts.schema}; if that is an older one, the next start brings it up to date"
        yield Finding("ok", _SUBJECT, text)
