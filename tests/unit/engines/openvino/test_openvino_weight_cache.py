"""The file of cached weights where something fails: the disk, the load, the process, or the file itself."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engines.openvino.weight_cache import Array, WeightCache

VALUES = [np.arange(20_000, dtype=np.uint8), np.arange(3_000, dtype=np.float16)]


def made() -> Sequence[Array]:
    return VALUES


def filled(folder: Path, limit: int = 1 << 20) -> WeightCache:
    cache = WeightCache(folder, limit, "key")
    for name in ("first", "second"):
        for found, wanted in zip(cache.arrays(name, made), VALUES, strict=True):
            np.testing.assert_array_equal(found, wanted)
    return cache


def is_found(folder: Path) -> bool:
    nothing: list[Array] = []
    return WeightCache(folder, 1 << 20, "key").arrays("second", lambda: nothing) is not nothing


@contextmanager
def disk_of(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("num_bytes", [10_000, 22_000, 54_710])
def test_a_full_disk(num_bytes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Wherever the file ends: within an array, in what waits to be written, or at the end."""
    with disk_of(num_bytes):
        filled(tmp_path).finish()
    assert "converted weights stay in memory" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_load_that_fails_leaves_nothing(tmp_path: Path) -> None:
    cache = filled(tmp_path)
    assert list(tmp_path.iterdir())
    del cache
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    """And nothing of a process that is still at it."""
    (tmp_path / ".new-left").write_bytes(bytes(1000))
    both = [filled(tmp_path), filled(tmp_path)]
    assert len(list(tmp_path.iterdir())) == 2
    for cache in both:
        cache.finish()
    del both, cache
    assert [path.name for path in tmp_path.iterdir()] == ["key.weights"]
    assert is_found(tmp_path)


def test_another_start_between_a_file_and_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes the file for one that a killed process has left."""
    lock, others = fcntl.flock, [lambda: filled(tmp_path).finish()]

    def late(file: Any, how: int) -> None:
        if others:
            others.pop()()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    filled(tmp_path).finish()
    assert not caplog.records
    assert [path.name for path in tmp_path.iterdir()] == ["key.weights"]


def test_what_a_network_file_system_keeps_is_left_alone(tmp_path: Path) -> None:
    """A file that was deleted, and that a server on this or another machine still maps."""
    (tmp_path / ".nfs0001").write_bytes(bytes(1000))
    filled(tmp_path).finish()
    assert (tmp_path / ".nfs0001").exists()


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a machine that loses its power may have the name and the end of the file, and zeros for weights."""
    written = []

    def noted(descriptor: int) -> None:
        assert not (tmp_path / "key.weights").exists()
        written.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fsync", noted)
    filled(tmp_path).finish()
    assert written == [(tmp_path / "key.weights").stat().st_size]


def test_a_file_that_cannot_be_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of another user, or in an image that is only read."""
    filled(tmp_path).finish()

    def refuse(path: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)
    before = (tmp_path / "key.weights").read_bytes()
    filled(tmp_path).finish()
    assert (tmp_path / "key.weights").read_bytes() == before
    assert not caplog.records


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"|u1", b"|u9"), (b"<f2", b"|O8"), (b"20032", b"20096"), (b"[3000]", b"[2000]"), (b'"first"', b'"fourth"')],
)
def test_a_damaged_index(old: bytes, new: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path).finish()
    file = tmp_path / "key.weights"
    whole = file.read_bytes()
    assert old in whole
    file.unlink()
    file.write_bytes(whole.replace(old, new))
    filled(tmp_path).finish()
    assert "the damaged file of cached weights is rebuilt" in caplog.text
    assert file.read_bytes() == whole


def test_two_that_make_room_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "gone.weights").symlink_to("nowhere")
    filled(tmp_path, limit=1).finish()
    assert not caplog.records
    assert is_found(tmp_path)
