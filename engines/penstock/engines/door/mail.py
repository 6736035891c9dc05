"""The mail between the loop of an engine process and the thread of its door, under one lock."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.messages import (
    AddRequest,
    CallReply,
    DownMessage,
    LoadAdapter,
    RequestOutput,
    StepRecord,
    UnloadAdapter,
)
from penstock.engines.inbox import Bell


class Arrival(NamedTuple):
    """Something that a client has sent for the engine."""

    message: DownMessage
    number: int
    """The client's."""
    samples: int
    size: int


class News(NamedTuple):
    """What the loop hands over."""

    outputs: dict[int, list[RequestOutput]]
    """By client."""
    replies: dict[int, list[CallReply]]
    stats: EngineStats
    steps: list[StepRecord]
    taken: list[tuple[int, int, int]]
    """Client, samples and bytes of messages that the engine has taken in."""


class DoorMail:
    """`loop_wakeup` is readable while there are arrivals, `thread_wakeup` while there is something for the thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: list[Arrival] = []
        self._news: list[News] = []
        self._loop_bell, self._thread_bell = Bell(), Bell()
        self.loop_wakeup, self.thread_wakeup = self._loop_bell.wakeup, self._thread_bell.wakeup
        self.draining = False
        """The loop wants: no new requests of clients."""
        self._closing: str | None = None
        """The loop wants: no clients any more, and why."""
        self.failed = False
        """The thread has ended by itself."""

    # -- the loop's side

    def take_arrivals(self) -> list[Arrival]:
        with self._lock:
            arrived, self._arrived = self._arrived, []
            if not self.failed:
                self._loop_bell.silence()
        return arrived

    def hand_over(self, news: News) -> None:
        with self._lock:
            self._news.append(news)
            self._thread_bell.ring()

    def drain(self) -> None:
        with self._lock:
            self.draining = True
            self._thread_bell.ring()

    def end(self, reason: str) -> None:
        with self._lock:
            self._closing = reason
            self._thread_bell.ring()

    def close(self) -> None:
        with self._lock:
            self._loop_bell.close()
            self._thread_bell.close()

    # -- the thread's side

    def arrived(self, arrival: Arrival) -> bool:
        """False: it is a new request, and the loop wants none."""
        with self._lock:
            if self.draining and isinstance(arrival.message, AddRequest):
                return False
            self._arrived.append(arrival)
            self._loop_bell.ring()
        return True

    def take_news(self) -> tuple[list[News], str | None]:
        """And why that was the last, if it was."""
        with self._lock:
            news, self._news = self._news, []
            self._thread_bell.silence()
            return news, self._closing

    def fail(self) -> None:
        with self._lock:
            self.failed = True
            self._loop_bell.ring()


class KnownAdapters:
    """Follows the owner's messages and their replies."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._loaded = dict.fromkeys(keys)
        self._loading: dict[int, str] = {}
        self.keys: tuple[str, ...] = tuple(self._loaded)
        """In the order of loading; replaced as a whole, so other threads may look."""

    def requested(self, message: DownMessage) -> None:
        if isinstance(message, LoadAdapter):
            self._loading[message.call] = message.key
        elif isinstance(message, UnloadAdapter):
            self._loaded.pop(message.key, None)
            self.keys = tuple(self._loaded)

    def replied(self, reply: CallReply) -> None:
        key = self._loading.pop(reply.call, None)
        if key is not None and reply.error is None:
            self._loaded[key] = None
            self.keys = tuple(self._loaded)
