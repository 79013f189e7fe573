"""Classes of routes: the whole table of gateway/access.py, line by line."""

from __future__ import annotations

import pytest

from antiphon.core.errors import Forbidden
from antiphon.core.grant import Grant, Limits, Meter
from antiphon.gateway.access import Access, require_access
from antiphon.gateway.callers import LOCAL, Caller

ADMIN = Grant(is_admin=True)
TOKEN = Meter(id="ct_1", limits=Limits())
CALLERS = {
    "local": LOCAL,
    "token": Caller("t", "t", "key_1", token=TOKEN),
    "token that says admin": Caller("t", "t", "key_1", ADMIN, TOKEN),
    "key": Caller("t", "t", "key_1"),
    "admin": Caller("t", "t", "key_1", ADMIN),
}
MAY = {
    Access.CLIENT: {*CALLERS},
    Access.CALLER: {"local", "key", "admin"},
    Access.KEY: {"key", "admin"},
    Access.ADMIN: {"admin"},
}


@pytest.mark.parametrize("access", MAY)
def test_table(access: Access) -> None:
    """Each class lets through whom it names, and nobody else."""
    let_through = set()
    for name, caller in CALLERS.items():
        try:
            require_access(access, caller)
        except Forbidden as error:
            assert error.status == 403
        else:
            let_through.add(name)
    assert let_through == MAY[access]
