"""A digest is of all that a file holds, and a file that has not changed is read once."""

from __future__ import annotations

import os
import pwd
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.engines.host import content_digest as module
from penstock.engines.host.content_digest import content_digest
from penstock.engines.host.user_cache import user_cache

MINUTE = 60 * 10**9


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_PART", 1000)
    monkeypatch.setattr(module, "_PIECE", 300)
    return tmp_path / "cache" / "penstock" / "digests"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(2500))
    return path


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute after the files were written."""
    monkeypatch.setattr(module.time, "time_ns", lambda now=time.time_ns: now() + MINUTE)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where parts of files were read."""
    found: list[int] = []
    read = os.preadv

    def noted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        found.append(offset)
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    return found


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("place", [0, 299, 999, 1000, 1700, 2499])
def test_every_byte_counts(place: int, file: Path) -> None:
    before = content_digest(file)
    flip(file, place)
    assert content_digest(file) != before
    flip(file, place)
    assert content_digest(file) == before


def test_length_counts(file: Path) -> None:
    content = file.read_bytes()
    digests = set()
    for size in (0, 1, 999, 1000, 1001, 2000, 2500):
        file.write_bytes(content[:size])
        digests.add(content_digest(file))
    assert len(digests) == 7


@pytest.mark.usefixtures("later")
def test_what_has_not_changed_is_not_read_again(file: Path, reads: list[int]) -> None:
    digest = content_digest(file)
    assert set(reads) >= {0, 300, 1000, 2300}
    reads.clear()
    link = file.with_name("link")
    link.symlink_to(file)  # as in the hub's cache
    assert [content_digest(path) for path in (file, link)] == [digest] * 2
    assert not reads
    copy = shutil.copy2(file, file.with_name("copy"))
    assert content_digest(copy) == digest
    assert reads


def in_place(path: Path) -> None:
    flip(path, 1500)


def by_another_file(path: Path) -> None:
    new = shutil.copy2(path, path.with_name("new"))
    flip(new, 1500)
    new.replace(path)


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("change", [in_place, by_another_file])
def test_a_change_that_keeps_size_and_time_is_seen(change: Callable[[Path], None], file: Path) -> None:
    """As with tools that copy a file's times, too."""
    before, found = content_digest(file), file.stat()
    change(file)
    times = found.st_atime_ns, found.st_mtime_ns
    os.utime(file, ns=times)
    while file.stat().st_ctime_ns == found.st_ctime_ns:  # until the file system's clock has gone on
        os.utime(file, ns=times)
    assert content_digest(file) != before


def test_a_file_that_was_just_written_is_not_remembered(file: Path, memory: Path, reads: list[int]) -> None:
    """It may change once more without a sign, where time is counted in long steps."""
    content_digest(file)
    reads.clear()
    content_digest(file)
    assert reads
    assert not memory.exists()


@pytest.mark.usefixtures("later")
def test_a_file_that_changes_meanwhile_is_not_remembered(
    file: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.preadv

    def changing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = read(descriptor, buffers, offset)
        flip(file, 0)
        return count

    os.utime(file, ns=(0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", changing)
        content_digest(file)
    assert not memory.exists()


@pytest.mark.usefixtures("later")
def test_a_memory_that_is_damaged_or_cannot_be_written(file: Path, memory: Path) -> None:
    digest = content_digest(file)
    [place] = memory.iterdir()
    for damage in (b"", b'[[1,2,3,4],"x"]', b"\xff\x00", place.read_bytes()[:-3]):
        place.write_bytes(damage)
        assert content_digest(file) == digest
    shutil.rmtree(memory)
    memory.write_text("no folder")
    assert content_digest(file) == digest
    assert [path.name for path in memory.parent.iterdir()] == ["digests"]


@pytest.mark.usefixtures("later")
def test_no_more_is_remembered_than_is_useful(file: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_REMEMBERED", 3)
    for number in range(5):
        content_digest(shutil.copy(file, file.with_name(str(number))))
    assert len(list(memory.iterdir())) == 3


def test_a_user_without_a_home_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a number which its system has no name for."""

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert user_cache("digests") == Path("/nonexistent/.cache/penstock/digests")
    assert content_digest(file)
