"""Usage as JSON and CSV."""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import BadRequest
from antiphon.gateway.usageexport import csv_pieces, json_pieces, time_of
from antiphon.store.usagereport import By, UsageRecord, UsageTotal

NOON = datetime.datetime(2026, 12, 1, 12, tzinfo=datetime.UTC)


def record(**fields: object) -> UsageRecord:
    values: dict[str, object] = dict.fromkeys(UsageRecord.__struct_fields__)
    numbers = {"prompt_tokens": 1, "cached_tokens": 0, "answer_tokens": 2, "cost_micros": 3}
    texts = {"id": "req_1", "tenant": "t", "gateway_id": "gw", "model": "m", "endpoint": "/v1/x"}
    return UsageRecord(**(values | numbers | texts | {"opened_at": NOON, "is_estimated": False} | fields))


async def paged(*pages: Sequence[UsageRecord]) -> AsyncIterator[Sequence[UsageRecord]]:
    for page in pages:
        yield page


async def joined(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (2, 1), (0, 2, 0, 1)])
async def test_json_is_one_array_however_it_is_paged(sizes: tuple[int, ...]) -> None:
    """All rows are in it, and it reads back as what it was made of."""
    rows = [[record(id=f"{page}-{n}") for n in range(size)] for page, size in enumerate(sizes)]
    text = await joined(json_pieces(paged(*rows), b'{"data":', b"}"))
    read = msgspec.json.decode(text, type=dict[str, list[UsageRecord]])
    assert read == {"data": [row for page in rows for row in page]}


async def test_csv_has_a_line_of_names_and_a_line_each() -> None:
    """Nothing for what is not known, true and false, times with their zone."""
    text = (
        await joined(csv_pieces(paged([record()], [record(id="req_2", is_estimated=True)]), By.REQUEST))
    ).decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["id"] for row in rows] == ["req_1", "req_2"]
    assert [row["is_estimated"] for row in rows] == ["false", "true"]
    assert rows[0]["opened_at"] == "2026-12-01T12:00:00+00:00"
    assert rows[0]["key_id"] == rows[0]["closed_at"] == ""


async def test_csv_of_nothing_has_names_all_the_same() -> None:
    """Totals and requests have different ones."""
    text = await joined(csv_pieces(paged(), By.DAY))
    assert text.decode().strip().split(",") == list(UsageTotal.__struct_fields__)


@given(st.text(st.characters(codec="utf-8")))
async def test_no_cell_is_a_formula(model: str) -> None:
    """Whatever a name holds, a spreadsheet computes nothing, and the rest of the line stays in its place."""
    text = (await joined(csv_pieces(paged([record(model=model)]), By.REQUEST))).decode()
    (row,) = csv.DictReader(io.StringIO(text, newline=""))
    assert not row["model"].startswith(("=", "+", "-", "@", "\t", "\r"))
    assert row["model"].removeprefix("'") == model.removeprefix("'")
    assert row["id"] == "req_1"


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2026-12-01", NOON - datetime.timedelta(hours=12)),
        ("2026-12-01T12:00:00", NOON),
        ("2026-12-01T12:00:00Z", NOON),
        ("2026-12-01T20:00:00+08:00", NOON),
    ],
)
def test_times(text: str, time: datetime.datetime) -> None:
    """Days and times, UTC where nothing else is said."""
    assert time_of(text, "since") == time
    assert time_of(text, "since").tzinfo is datetime.UTC


@pytest.mark.parametrize(
    "text", ["", "yesterday", "1", "2026-13-01", "0001-01-01T00:00:00+23:00", "x" * 10_000]
)
def test_what_is_no_time(text: str) -> None:
    """It is said in one line, whose length is bounded."""
    with pytest.raises(BadRequest, match="is no time") as caught:
        time_of(text, "since")
    assert len(caught.value.message) < 200
    assert caught.value.param == "since"
