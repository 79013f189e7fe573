"""Times in and out of the database."""

from __future__ import annotations

import datetime

import pytest
from sqlalchemy.dialects import postgresql, sqlite

from antiphon.store.schema import UtcTime

NOON = datetime.datetime(2026, 12, 1, 12, tzinfo=datetime.UTC)
EAST = datetime.timezone(datetime.timedelta(hours=8))
DIALECTS = [sqlite.dialect(), postgresql.dialect()]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_times_are_utc(dialect: sqlite.dialect) -> None:
    """What goes in from any zone comes out in UTC, whether the database kept the zone or lost it."""
    time = UtcTime()
    stored = time.process_bind_param(NOON.astimezone(EAST), dialect)
    assert stored == NOON
    assert stored.utcoffset() == datetime.timedelta(0)
    assert time.process_result_value(stored.replace(tzinfo=None), dialect) == NOON
    assert time.process_result_value(NOON.astimezone(EAST), dialect) == NOON
    assert time.process_bind_param(None, dialect) is time.process_result_value(None, dialect) is None


def test_times_without_a_zone_are_refused() -> None:
    """Nobody could say what they mean."""
    with pytest.raises(ValueError, match="no time zone"):
        UtcTime().process_bind_param(NOON.replace(tzinfo=None), DIALECTS[0])
