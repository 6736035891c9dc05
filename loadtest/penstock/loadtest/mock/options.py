"""The options of the reference server, and the schedule that they make."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Milliseconds = Annotated[float, Meta(ge=0, extra={"unit": "ms"})]


class MockOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Its address, and when it writes what."""

    host: Annotated[str, Meta(extra={"metavar": "ADDR"}, description="address to listen on")] = "127.0.0.1"
    port: Annotated[
        int, Meta(extra={"metavar": "PORT"}, description="port to listen on; 0: a free one", ge=0, le=65535)
    ] = 18900
    model: Annotated[str, Meta(extra={"metavar": "NAME"}, description="the model's name")] = "mock"
    ttft_ms: Annotated[Milliseconds, Meta(description="from the request's last byte to the first token")] = 50.0
    itl_ms: Annotated[Milliseconds, Meta(description="between tokens; 0: as fast as they can be written")] = 10.0
    tokens_per_write: Annotated[
        int, Meta(description="tokens that one write brings together; 0: all of them", ge=0)
    ] = 1
    text: Annotated[str, Meta(description="a token's text")] = " a"
    pause_every_ms: Annotated[
        Milliseconds, Meta(description="begin a pause, in which nothing is written, so often; 0: never")
    ] = 0.0
    pause_ms: Annotated[Milliseconds, Meta(description="how long each pause is")] = 0.0


class Schedule:
    """When what is due."""

    def __init__(self, options: MockOptions, started: float) -> None:
        """`started`: time.perf_counter at which the time between pauses begins."""
        self._ttft = options.ttft_ms / 1e3
        self._itl = options.itl_ms / 1e3
        self._every = options.pause_every_ms / 1e3
        self._pause = options.pause_ms / 1e3
        self._started = started

    def due(self, received: float, token: int) -> float:
        """When the request's nth token is due. Counted from the request's arrival, so that lateness does not add up.

        What would fall into a pause is due at its end. Pauses lie at the end of each period.
        """
        time = received + self._ttft + token * self._itl
        if self._every:
            left = self._every - (time - self._started) % self._every
            if left <= self._pause:
                time += left
        return time
