"""What threads say to a loop: all of it, in order, with a descriptor that says when there is something."""

from __future__ import annotations

import os
import select
import threading

from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.inbox import Inbox


def is_readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


@given(st.lists(st.integers(0, 3)))
def test_everything_is_taken_once_in_its_order(sizes: list[int]) -> None:
    """`sizes`: how much is put in before each look."""
    inbox: Inbox[int] = Inbox()
    number = 0
    for size in sizes:
        put = list(range(number, number + size))
        for item in put:
            inbox.put(item)
        assert is_readable(inbox.wakeup) == bool(put)
        assert inbox.take() == put
        assert not is_readable(inbox.wakeup)
        number += size
    inbox.close()


def test_no_item_of_several_threads_is_missed() -> None:
    inbox: Inbox[tuple[int, int]] = Inbox()
    threads = [
        threading.Thread(target=lambda own: [inbox.put((own, number)) for number in range(500)], args=(own,))
        for own in range(3)
    ]
    for thread in threads:
        thread.start()
    taken: list[tuple[int, int]] = []
    while len(taken) < 1500:
        assert select.select([inbox.wakeup], [], [], 30)[0]
        taken += inbox.take()
    for thread in threads:
        thread.join()
    assert sorted(taken, key=lambda item: item[0]) == [(own, number) for own in range(3) for number in range(500)]
    assert not is_readable(inbox.wakeup)
    inbox.close()


def test_what_comes_after_its_end_reaches_no_other_descriptor() -> None:
    inbox: Inbox[int] = Inbox()
    inbox.put(1)
    inbox.close()
    reader, writer = os.pipe()
    os.dup2(reader, inbox.wakeup)
    os.write(writer, b"?")
    inbox.put(2)
    assert inbox.take() == [1, 2]
    assert os.read(reader, 2) == b"?"
    for descriptor in {reader, writer, inbox.wakeup}:
        os.close(descriptor)
