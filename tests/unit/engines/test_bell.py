"""The descriptor by which one thread wakes another."""

from __future__ import annotations

import os
import select

import pytest

from penstock.engines.inbox import Bell


def is_readable(bell: Bell) -> bool:
    poll = select.poll()
    poll.register(bell.wakeup, select.POLLIN)
    return bool(poll.poll(0))


def test_however_often_it_is_rung_one_silence_is_enough() -> None:
    bell = Bell()
    bell.silence()
    assert not is_readable(bell)
    bell.ring()
    bell.ring()
    assert is_readable(bell)
    bell.silence()
    assert not is_readable(bell)
    bell.close()


def test_closed_it_can_still_be_rung_and_closed() -> None:
    bell = Bell()
    bell.close()
    bell.ring()
    bell.close()


def test_closed_it_leaves_alone_what_has_its_descriptor_now() -> None:
    bell = Bell()
    bell.ring()
    bell.close()
    reader, writer = os.pipe()
    os.dup2(reader, bell.wakeup)
    os.write(writer, b"?")
    bell.silence()
    assert os.read(reader, 1) == b"?"
    for descriptor in {reader, writer, bell.wakeup}:
        os.close(descriptor)


def test_dropped_it_gives_its_descriptors_back() -> None:
    bell = Bell()
    descriptor = bell.wakeup
    del bell
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
