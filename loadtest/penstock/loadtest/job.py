"""The messages between the command and its client processes: frames of msgpack, each after its length."""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec

from penstock.loadtest.messages import Sample
from penstock.loadtest.options import Options


class Job(msgspec.Struct, frozen=True, kw_only=True, tag="job"):
    """The first frame: which part of which run."""

    options: Options
    part: int
    parts: int
    seed: int
    """Of this run; repeats differ."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Everybody is ready."""

    at: float
    """time.perf_counter, which the processes of a machine share."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Begin nothing more; `now`: cut off what runs."""

    now: bool = False


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Connected and warmed up."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """This run cannot be."""

    message: str


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Several times a second: what has ended since the last one."""

    samples: list[Sample]
    in_flight: int


class Done(msgspec.Struct, frozen=True, tag="done", kw_only=True):
    """The last frame."""

    cpu_seconds: float
    """Of this process during the run."""
    wall_seconds: float
    lag_ms: list[float]
    """By how much the event loop was late, at each of its regular looks."""
    held_up: bool = False
    """Open loop: something that was due had to wait for one of the places that there are at most."""


Down = Job | Start | Stop
Up = Ready | Failed | Progress | Done

_HEADER_BYTES = 4
encode = msgspec.msgpack.Encoder().encode
decode_down = msgspec.msgpack.Decoder(Down).decode
decode_up = msgspec.msgpack.Decoder(Up).decode


class Writer(Protocol):
    def write(self, data: bytes, /) -> object: ...


def send(writer: Writer, frame: Down | Up) -> None:
    data = encode(frame)
    writer.write(len(data).to_bytes(_HEADER_BYTES, "little") + data)


async def receive(reader: asyncio.StreamReader) -> bytes | None:
    """One frame, still encoded; None at the end."""
    try:
        size = int.from_bytes(await reader.readexactly(_HEADER_BYTES), "little")
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError:
        return None
