"""The responses of another model's stream, as the model that asked gets them."""

from __future__ import annotations

import queue
from typing import Any, cast

import pytest

from penstock.classic.python.worker import host as worker_host
from penstock.classic.python.worker.errors import TritonModelException
from penstock.classic.python.worker.host import Host, ResponseIterator
from penstock.classic.python.worker.response import InferenceResponse


class Told:
    """What the server is told of the stream."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def tell(self, verb: str, *fields: Any) -> None:
        self.said.append((verb, *fields))

    def cancel(self, number: int) -> None:
        self.said.append(("cancel", number))

    def forget(self, number: int) -> None:
        self.said.append(("forget", number))


class Sized(InferenceResponse):
    __slots__ = ("byte_size",)

    def __init__(self, byte_size: int) -> None:
        super().__init__()
        self.byte_size = byte_size  # type: ignore[misc]


def stream(count: int, size: int = 0) -> tuple[ResponseIterator, list[InferenceResponse], Told]:
    """One of so many responses, all of which are there."""
    told, responses = Told(), [cast(InferenceResponse, Sized(size)) for _ in range(count)]
    received: queue.SimpleQueue[tuple[InferenceResponse, bool]] = queue.SimpleQueue()
    for number, response in enumerate(responses, 1):
        received.put((response, number == count))
    return ResponseIterator(cast(Host, told), 7, received), responses, told


def test_the_responses_can_be_read_again_from_the_first_one() -> None:
    found, responses, told = stream(40)
    assert [list(found), list(found), list(found)] == [responses] * 3
    assert told.said == [("consumed", 7, 16), ("consumed", 7, 16), ("forget", 7)]


def test_before_the_end_reading_goes_on_where_it_was() -> None:
    found, responses, _ = stream(3)
    assert next(found) is responses[0]
    assert list(found) == responses[1:]
    with pytest.raises(StopIteration):
        next(found)
    assert next(iter(found)) is responses[0]
    assert list(found) == responses[1:]
    assert list(found) == responses


def test_a_stream_that_is_too_long_to_be_kept_is_not_given_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_host, "KEPT_RESPONSES", 3)
    for count, size in ((4, 0), (2, worker_host.KEPT_BYTES)):
        found, responses, _ = stream(count, size)
        assert list(found) == responses
        assert found._kept is None
        with pytest.raises(TritonModelException, match="can be iterated once"):
            list(found)
    found, responses, _ = stream(3, worker_host.KEPT_BYTES // 3)
    assert [list(found), list(found)] == [responses] * 2


def test_cancelling_asks_and_letting_go_ends() -> None:
    found, responses, told = stream(2)
    found.cancel()
    assert list(found) == responses
    found.cancel()
    del found
    assert told.said == [("ask_to_stop", 7), ("forget", 7)]
    found, _, told = stream(2)
    next(found)
    del found
    assert told.said == [("forget", 7), ("cancel", 7)]
