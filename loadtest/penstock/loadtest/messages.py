"""The calls that a workload makes, and the samples that were measured of them. Both travel between processes and into
reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

Prompt = str | list[int] | list[dict[str, Any]]
"""Text, token ids, or chat messages."""


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request of a workload."""

    index: int
    """Unique in the run, counted from 0 in the order of the workload."""
    prompt: Prompt
    output_tokens: int
    """Most tokens to generate; with `ignore_eos` exactly so many."""
    prompt_tokens: int | None = None
    """What the prompt is by the workload's tokenizer; None: not known."""
    asked_prompt_tokens: int | None = None
    """What the settings, or a trace, want it to be; None: nothing, as with prompts from a file."""
    delay: float = 0.0
    """Seconds between the end of the session's last answer and this call."""
    tag: str = ""
    """Which part of a mix it belongs to."""


class Session(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Calls that follow one another: each is sent when the one before it is answered, with that answer in its history.
    Most have one call."""

    calls: list[Call]
    at: float | None = None
    """Seconds after the start of the run at which the first is to be sent; None: as soon as there is a free place."""


class Answer(msgspec.Struct, kw_only=True):
    """What a client saw of one request. Times are of time.perf_counter."""

    sent: float
    """The request's last byte was handed to the kernel."""
    ended: float
    """The answer was complete, or the failure was noticed."""
    connect: float = 0.0
    """Seconds spent on a new connection before `sent`; 0 on one that was open."""
    arrivals: list[float] = []
    """When each piece of output had come; none of an answer that is not streamed, which comes at its end."""
    pieces: list[int] = []
    """Tokens of each piece, where the protocol tells; else empty, and a piece counts as one token."""
    reads: int = 0
    """Times the socket was read. Fewer reads than pieces: pieces came together, or this client was late."""
    prompt_tokens: int | None = None
    """As the server counts; None: it does not say."""
    output_tokens: int | None = None
    finish_reason: str | None = None
    text: str | None = None
    """The output, where the client was asked to keep it."""
    error: str = ""
    """The kind of a failure, from `errors`; empty: complete."""
    detail: str = ""
    """What the failure says, shortened."""
    rest: Callable[[], None] | None = None
    """Fills in everything but the times and the reads, from what has come: see ClientOptions.defer."""

    def complete(self) -> None:
        rest, self.rest = self.rest, None
        if rest is not None:
            rest()


class Sample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request of a run. Times are seconds after the start of the run."""

    index: int
    tag: str = ""
    intended: float
    """When the workload wanted it sent. Latencies from here on know no coordinated omission."""
    sent: float
    ended: float
    connect: float = 0.0
    arrivals: list[float] = []
    pieces: list[int] = []
    reads: int = 0
    wanted_prompt_tokens: int | None = None
    asked_prompt_tokens: int | None = None
    wanted_output_tokens: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    error: str = ""
    detail: str = ""

    @property
    def tokens(self) -> int:
        """Output tokens: as the server counted them, else by pieces."""
        if self.output_tokens is not None:
            return self.output_tokens
        return sum(self.pieces) if self.pieces else len(self.arrivals)
