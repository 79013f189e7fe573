"""Reading a worker's `/kv` pages."""

from __future__ import annotations

import pytest

from antiphon.cli.kvpages import WorkerPages, WorkerSilent
from antiphon.worker.kvinfo import KvHeld
from support.kvpages import SECRET, make_info, worker_pages


def test_worker_tells_who_knows_the_secret() -> None:
    """Both pages are read in their forms."""
    info, held = make_info(), KvHeld(engine=["00"], host=[])
    with worker_pages(info, held) as url:
        assert WorkerPages(url + "/", SECRET).info() == info
        assert WorkerPages(url, SECRET).held() == held


def test_wrong_secret_is_named_and_not_shown() -> None:
    """The refusal says which worker, and the secret stands nowhere."""
    with worker_pages(make_info()) as url:
        pages = WorkerPages(url, "hunter2 is not the secret")
        with pytest.raises(WorkerSilent, match="403") as silence:
            pages.info()
    assert url in str(silence.value)
    assert "hunter2" not in str(silence.value) + repr(pages)


def test_worker_without_such_pages_is_named() -> None:
    """A missing page is told from a refusal, and from a page of another form."""
    with worker_pages(make_info()) as url, pytest.raises(WorkerSilent, match="404"):
        WorkerPages(url + "/elsewhere", SECRET).info()
    with worker_pages(KvHeld(engine=[], host=[])) as url, pytest.raises(WorkerSilent, match="version"):
        WorkerPages(url, SECRET).info()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://[", ""])
def test_worker_that_is_not_there_is_named(url: str) -> None:
    """Nobody listens, or the address is none."""
    with pytest.raises(WorkerSilent, match="/kv"):
        WorkerPages(url, SECRET).info()
