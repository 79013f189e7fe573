"""worker.weightcache: the folder, the lock, the room, the CPU's name."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from antiphon.worker import weightcache
from antiphon.worker.weightcache import Locked, LockTimeout, cache_folder, cpu_identity, room_for

DEED = "tuning the weights"


def quiet(text: str, fraction: float) -> None:
    """A progress line nobody reads."""


def test_the_folder_follows_xdg() -> None:
    """XDG_CACHE_HOME decides; without it, or empty, ~/.cache does."""
    assert cache_folder({"XDG_CACHE_HOME": "/var/cache"}) == Path("/var/cache/antiphon/weights")
    home = Path.home() / ".cache/antiphon/weights"
    assert cache_folder({}) == cache_folder({"XDG_CACHE_HOME": ""}) == home


def test_a_lock_keeps_others_out_until_it_is_left(tmp_path: Path) -> None:
    """While one holds the lock another runs out of time; afterwards, also after an error, it gets in."""
    lock = tmp_path / "new" / "a.lock"
    with (
        Locked(lock, DEED, 5.0, quiet),
        pytest.raises(LockTimeout, match=f"another worker has been {DEED}"),
    ):
        Locked(lock, DEED, 0.0, quiet).__enter__()
    with pytest.raises(KeyError), Locked(lock, DEED, 0.0, quiet):
        raise KeyError
    with Locked(lock, DEED, 0.0, quiet):
        pass


def test_waiting_for_a_lock_is_shown(tmp_path: Path) -> None:
    """Whoever waits says so, and gets in as soon as the holder is done."""
    holder = Locked(tmp_path / "a.lock", DEED, 5.0, quiet)
    holder.__enter__()
    said: list[str] = []

    def hear(text: str, fraction: float) -> None:
        said.append(text)
        if len(said) == 1:
            holder.__exit__(None, None, None)

    with Locked(tmp_path / "a.lock", DEED, 60.0, hear):
        assert said == [f"waiting for another worker that is {DEED}"]


def test_the_cpu_has_a_steady_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The identity is the same at every call and another one where llama.cpp sees other features."""
    here = cpu_identity()
    assert here == cpu_identity()
    assert len(here) == 16
    monkeypatch.setattr(weightcache.llama_cpp, "llama_print_system_info", lambda: b"CPU : none")
    assert cpu_identity() != here


def test_room_is_asked_of_disk_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model fits; one larger than disk or memory is refused with the reason's errno."""
    room_for("Q8_0", 1_000, tmp_path)
    with pytest.raises(OSError, match="MiB of disk") as disk:
        room_for("Q8_0", 10**16, tmp_path)
    assert disk.value.errno == errno.ENOSPC
    monkeypatch.setattr(weightcache, "_available_memory_bytes", lambda: 10_000_000)
    with pytest.raises(OSError, match="BF16 needs about 28 MiB of memory, 9 MiB are available") as memory:
        room_for("BF16", 10_000_000, tmp_path)
    assert memory.value.errno == errno.ENOMEM
