"""The seam between the run and the protocols."""

from __future__ import annotations

from typing import Protocol

import msgspec

from penstock.loadtest.messages import Answer, Call


class ClientOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What every client is told. Each protocol refuses what it has no place for."""

    url: str
    model: str = ""
    api_key: str | None = None
    stream: bool = True
    ignore_eos: bool = True
    end_mark: bool = True
    """A stream is complete with [DONE] only; else its finish reason is enough."""
    extra: dict[str, object] = {}
    """Merged into each request."""
    headers: dict[str, str] = {}
    timeout: float = 600.0
    """Seconds for one request, from the moment it is sent."""
    keep_alive: bool = True
    """Use connections again."""
    verify_tls: bool = True
    input_tensor: tuple[str, ...] = ()
    batch_size: int = 1
    keep_text: bool = False
    """Answers carry their text: for sessions, which go on from it."""
    seed: int = 0
    """Of the tensors that a client makes."""
    defer: bool = False
    """Answers may come as they are read, with Answer.rest left to the caller: streams of thousands of tokens take
    milliseconds to take apart, in which the tokens of others would seem late."""


class Client(Protocol):
    """Sends calls on one event loop. Failures of requests are answers, too: nothing but LoadTestError is raised."""

    async def open(self) -> None:
        """Checks the address. Raises LoadTestError for an option that this protocol does not have."""
        ...

    async def send(self, call: Call) -> Answer:
        """Cancellation disconnects."""
        ...

    async def close(self) -> None: ...
