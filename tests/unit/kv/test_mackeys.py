"""The MAC key file: made once, private, whole or not there, rotated without losing what is valid."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from antiphon.kv import mackeys
from antiphon.kv.mackeys import MacKey, MacKeyError, MacKeys, NoMacKeys, load, load_or_create, rotate

RIVALS = 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a key file would be, in a folder that is not there yet."""
    return tmp_path / "state" / "mac-keys"


def written(path: Path, data: bytes) -> Path:
    """A private file with this in it."""
    path.parent.mkdir(exist_ok=True)
    path.touch(0o600)
    path.write_bytes(data)
    return path


def files(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir())


def test_the_first_start_makes_it_and_the_second_reads_it(path: Path) -> None:
    """All starts of a machine use one key; two machines do not."""
    first = load_or_create(path)
    assert load_or_create(path) == load(path) == first
    assert first.previous is None
    assert load_or_create(path.with_name("elsewhere")) != first
    assert files(path) == ["elsewhere", "mac-keys"], "nothing else is left lying about"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_its_owner_can_read_it(path: Path, umask: int) -> None:
    """Whatever the umask, after making and after rotating."""
    before = os.umask(umask)
    try:
        load_or_create(path)
        assert path.stat().st_mode & 0o777 == 0o600
        rotate(path)
        assert path.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("mode", "is_fine"),
    [(0o600, True), (0o400, True), (0o440, True), (0o604, False), (0o660, False), (0o601, False)],
)
def test_a_file_that_others_can_open_is_refused(path: Path, mode: int, is_fine: bool) -> None:
    """A key that others may know proves nothing. A group may read: mounted secrets are like that."""
    keys = load_or_create(path)
    path.chmod(mode)
    if is_fine:
        assert load(path) == keys
        return
    with pytest.raises(MacKeyError, match=f"mode {mode:o}.*chmod 600"):
        load_or_create(path)


def test_a_file_cut_anywhere_gives_no_other_key(path: Path) -> None:
    """Of every prefix: refused, or the same current key (cut after its line, or of the last newline)."""
    load_or_create(path)
    keys = rotate(path)
    data = path.read_bytes()
    accepted = []
    for size in range(len(data)):
        written(path, data[:size])
        try:
            assert load_or_create(path) in (keys, MacKeys(keys.current))
        except MacKeyError:
            assert path.read_bytes() == data[:size], "a damaged file is left for its owner to see"
        else:
            accepted.append(size)
    first_line_end = data.index(b"previous")
    assert accepted == [first_line_end - 1, first_line_end, len(data) - 1]


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [b"antiphon-mac-keys 2", *lines[1:]],
        lambda lines: [*lines, lines[2]],
        lambda lines: [lines[0], lines[2], lines[1]],
        lambda lines: [lines[0], lines[1] + b"00", lines[2]],
        lambda lines: [lines[0], lines[1][:-2], lines[2]],
        lambda lines: [lines[0], lines[1][:-1] + (b"0" if lines[1][-1:] != b"0" else b"1"), lines[2]],
        lambda lines: [lines[0], lines[1], lines[2].replace(b" ", b"")],
        lambda lines: [b"\xff\xfe", *lines],
        lambda lines: [lines[0], lines[1], lines[2], b"x" * 10_000],
        lambda lines: [b"\0" * 100],
    ],
    ids=["version", "extra-key", "order", "long", "short", "digit", "words", "not-ascii", "huge", "zeros"],
)
def test_a_damaged_file_is_refused(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    """It is neither used nor overwritten, and the message names no secret."""
    load_or_create(path)
    keys = rotate(path)
    written(path, b"\n".join(change(path.read_bytes().splitlines())))
    with pytest.raises(MacKeyError, match="is damaged") as caught:
        load_or_create(path)
    assert keys.current.secret.hex() not in str(caught.value)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_secret_has_its_length(size: int) -> None:
    """A short secret is refused, not padded."""
    with pytest.raises(ValueError, match="32 bytes"):
        MacKey.of(bytes(size))


def test_processes_that_make_it_at_once_end_with_one_key(path: Path) -> None:
    """Real processes, let go together: one file, one key, no leftovers."""
    code = (
        "import sys, pathlib; from antiphon.kv.mackeys import load_or_create; print(flush=True);"
        "sys.stdin.readline(); print(load_or_create(pathlib.Path(sys.argv[1])).current.secret.hex())"
    )
    rivals = [
        subprocess.Popen(
            [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(RIVALS)
    ]
    for rival in rivals:
        assert rival.stdout is not None
        assert rival.stdout.readline() == "\n"
    for rival in rivals:
        assert rival.stdin is not None
        rival.stdin.write("\n")
        rival.stdin.flush()
    secrets = {rival.communicate(timeout=60)[0].strip() for rival in rivals}
    assert [rival.returncode for rival in rivals] == [0] * RIVALS
    assert secrets == {load(path).current.secret.hex()}
    assert files(path) == ["mac-keys"]


def test_who_comes_second_takes_the_firsts_key(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The narrowest race: the file appears after we looked and before ours is in place."""
    link = os.link
    first = []

    def beaten(whole: Path, target: Path) -> None:
        monkeypatch.setattr(mackeys.os, "link", link)
        first.append(load_or_create(path))
        link(whole, target)

    monkeypatch.setattr(mackeys.os, "link", beaten)
    assert load_or_create(path) == first[0] == load(path)
    assert files(path) == ["mac-keys"]


def test_a_failed_start_leaves_nothing_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: no half-written file under any name, and a message that says so."""

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mackeys.os, "fsync", full)
    with pytest.raises(MacKeyError, match="cannot be made: No space left on device"):
        load_or_create(path)
    assert files(path) == []


def test_rotating_keeps_the_last_key_valid(path: Path) -> None:
    """The key before is still believed, the one before that is not."""
    first = load_or_create(path).current
    second = rotate(path)
    assert load(path) == second
    assert second.previous == first
    third = rotate(path)
    assert third.previous == second.current
    assert len({first.id, second.current.id, third.current.id}) == 3
    assert third.find(first.id) is None
    assert third.find(second.current.id) == second.current
    assert third.find(third.current.id) == third.current
    assert (second.retired, third.retired) == ((), (first.id,))
    assert load(path) == third
    assert files(path) == ["mac-keys"]


def test_the_numbers_of_retired_keys_are_bounded(path: Path) -> None:
    """The latest are kept, and the file stays one that can be read."""
    keys = [load_or_create(path).current, *(rotate(path).current for _ in range(20))]
    kept = load(path)
    assert kept.retired == tuple(key.id for key in reversed(keys[3:-2]))
    assert all(kept.find(number) is None for number in kept.retired)


@pytest.mark.parametrize("line", ["retired", "retired 12", "retired xyzxyzxy", "retired 01020304 05"])
def test_a_damaged_retired_number_is_noticed(path: Path, line: str) -> None:
    """As a damaged key is."""
    load_or_create(path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(MacKeyError, match="damaged"):
        load(path)


def test_two_rotations_at_once_lose_no_key(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused while the first is under way: else one of the new keys would vanish unseen."""
    keys = load_or_create(path)
    replace = os.replace

    def second_comes(whole: Path, target: Path) -> None:
        with pytest.raises(MacKeyError, match="being rotated by another"):
            rotate(path)
        replace(whole, target)

    monkeypatch.setattr(mackeys.os, "replace", second_comes)
    first = rotate(path)
    assert load(path) == first
    assert first.previous == keys.current
    monkeypatch.undo()
    assert rotate(path).previous == first.current, "and the lock is free again"


def test_a_rotation_that_fails_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old file stays until the new one is whole."""
    keys = load_or_create(path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mackeys.os, "fsync", full)
    with pytest.raises(MacKeyError, match="cannot be rotated: No space left on device"):
        rotate(path)
    assert load(path) == keys
    assert files(path) == ["mac-keys"]


def test_what_is_not_there_is_said(path: Path) -> None:
    """Reading and rotating make no file; only a start does."""
    for act in (load, rotate):
        with pytest.raises(NoMacKeys, match="no MAC key file"):
            act(path)
    path.parent.mkdir()
    with pytest.raises(NoMacKeys):
        rotate(path)
    path.mkdir()
    with pytest.raises(MacKeyError, match="cannot be read"):
        load_or_create(path)


def test_secrets_do_not_show(path: Path) -> None:
    """Neither in the text of an object nor as the key that signs: that one is derived."""
    key = load_or_create(path).current
    shown = repr(load(path)) + str(key)
    assert key.secret.hex() not in shown and repr(key.secret) not in shown
    assert repr(key.mac) not in shown
    assert key.mac != key.secret


def test_derivations_stay_what_they_are() -> None:
    """A changed derivation makes every stored block a stranger's."""
    key = MacKey.of(bytes(range(32)))
    assert key.id.hex() == "5621af5e"
    assert key.mac.hex() == "d20cf252c40d37911e8f79c7f7fd57cbbe8c75beb7e17911aa766969f736cc56"
