"""What clients can try against the gRPC port. Each attack has some seconds, and leaves its connections open."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable

from wire import Attacker, call_block, infer_message, many, message, opened, sent, until

from penstock.gateway.transports.http2 import frames
from penstock.gateway.transports.http2.frames import FrameType, frame

SECONDS = 6.0
INFER = call_block(b"ModelInfer")
ATTACKS: dict[str, Callable[[int], Awaitable[list[Attacker]]]] = {}


def attack(name: str) -> Callable[[Callable[[int], Awaitable[list[Attacker]]]], None]:
    def add(run: Callable[[int], Awaitable[list[Attacker]]]) -> None:
        ATTACKS[name] = run

    return add


def flood(name: str, rounds: Callable[[Attacker], bytes], *, begin_with: bytes = b"") -> None:
    """The same again and again on one connection; another one when the server has ended it."""

    async def run(port: int) -> list[Attacker]:
        used = []
        attacker = None
        for _ in until(SECONDS):
            if attacker is None or not attacker.alive:
                attacker = await Attacker(port).connect()
                used.append(attacker)
                if begin_with:
                    await attacker.write(begin_with)
            await attacker.write(b"".join([rounds(attacker) for _ in range(200)]))
            await asyncio.sleep(0)
        return used

    attack(name)(run)


@attack("answers that nobody reads: 60 connections, 30 answers of 512 KiB each, windows of 0")
async def _(port: int) -> list[Attacker]:
    attackers = await many(port, 60, window=0)
    grow = infer_message("grow")
    for _ in range(30):
        for attacker in attackers:
            number = attacker.stream()
            await attacker.write(opened(number, INFER) + sent(number, grow))
        await asyncio.sleep(0.1)
    return attackers


@attack("errors that nobody reads: calls of an unknown method, the socket is not read")
async def _(port: int) -> list[Attacker]:
    attackers = await many(port, 4, reads=False)
    block = call_block(b"Nothing")
    for _ in until(SECONDS):
        for attacker in attackers:
            attacker._writer.write(b"".join([opened(attacker.stream(), block) for _ in range(500)]))
        await asyncio.sleep(0.02)
        if all(attacker._writer.transport.get_write_buffer_size() > 1 << 22 for attacker in attackers):
            break
    return attackers


@attack("bodies of 60 KiB that do not end: 20 connections, 1000 streams each")
async def _(port: int) -> list[Attacker]:
    attackers = await many(port, 20)
    piece = b"\0\0\1\0\0" + bytes(15_000)
    for _ in range(1000):
        for attacker in attackers:
            number = attacker.stream()
            body = sent(number, piece, end=False) + sent(number, bytes(15_000), end=False) * 3
            await attacker.write(opened(number, INFER) + body)
    return attackers


@attack("bodies in frames of one byte: 10 connections, 100 streams each")
async def _(port: int) -> list[Attacker]:
    attackers = await many(port, 10)
    for attacker in attackers:
        numbers = [attacker.stream() for _ in range(100)]
        await attacker.write(b"".join([opened(n, INFER) + sent(n, b"\0\0\1\0\0", end=False) for n in numbers]))
    for _ in until(SECONDS):
        for attacker in attackers:
            await attacker.write(b"".join([sent(n, b"x", end=False) * 20 for n in range(1, 200, 2)]))
    return attackers


@attack("calls that send nothing: 100 connections, 1000 streams each")
async def _(port: int) -> list[Attacker]:
    attackers = await many(port, 100)
    for _ in range(10):
        for attacker in attackers:
            await attacker.write(b"".join([opened(attacker.stream(), INFER) for _ in range(100)]))
    return attackers


@attack("headers of 15 KiB: 20 connections, 1000 streams each that send nothing")
async def _(port: int) -> list[Attacker]:
    attackers = await many(port, 20)
    for index in range(1000):
        block = call_block(b"ModelInfer", [(b"k%d" % n, b"%d" % index) for n in range(390)])
        for attacker in attackers:
            await attacker.write(opened(attacker.stream(), block))
    return attackers


@attack("headers that every connection remembers: 400 connections")
async def _(port: int) -> list[Attacker]:
    attackers = await many(port, 400)
    for index in range(40):
        block = call_block(b"Nothing", [(b"a", b"%d" % index)]) + b"\x8f" * 80
        for attacker in attackers:
            await attacker.write(opened(attacker.stream(), block))
    return attackers


@attack("streams that are left open after their answer: 400 connections, 4000 streams each")
async def _(port: int) -> list[Attacker]:
    attackers = await many(port, 400)
    block = call_block(b"Nothing")
    for _ in range(40):
        for attacker in attackers:
            await attacker.write(b"".join([opened(attacker.stream(), block) for _ in range(100)]))
    return attackers


def _in_vain(attacker: Attacker, method: bytes, end: Callable[[int], bytes]) -> bytes:
    number = attacker.stream()
    return opened(number, method) + end(number)


flood("rapid reset", lambda a: _in_vain(a, INFER, lambda n: sent(n, infer_message("slow")) + frames.reset(n, 8)))
flood("made you reset: WINDOW_UPDATE of 0", lambda a: _in_vain(a, INFER, lambda n: frames.window_update(n, 0)))
flood("made you reset: data behind the end", lambda a: _in_vain(a, INFER, lambda n: sent(n, b"") + sent(n, b"x")))
flood("malformed requests", lambda a: opened(a.stream(), b"\x83\x86"))
flood("pings", lambda a: frame(FrameType.PING, 0, 0, bytes(8)))
flood("settings", lambda a: frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: 1000}))
flood("empty data", lambda a: sent(1, b"", end=False), begin_with=opened(1, INFER))
flood("PRIORITY", lambda a: frame(FrameType.PRIORITY, 0, 1, bytes(5)))
flood("unknown frames of 1 KiB", lambda a: frame(0x77, 0, 1, bytes(1024)))
flood("window updates", lambda a: frames.window_update(0, 1))
flood("CONTINUATION without end", lambda a: frame(FrameType.CONTINUATION, 0, 1), begin_with=frame(1, 0, 1, b"\x83"))
flood("CONTINUATION of 1 KiB", lambda a: frame(9, 0, 1, b"\0\1a\1b" * 200), begin_with=frame(1, 0, 1, b"\x83"))
flood("header blocks of 300 indexes", lambda a: opened(a.stream(), call_block(b"Nothing") + b"\x8f" * 300))
flood("header blocks of 1900 indexes", lambda a: opened(a.stream(), call_block(b"Nothing") + b"\x8f" * 1900))
flood(
    "an entry of the table, named 10,000 times",
    lambda a: opened(a.stream(), b"\x83\x40\1a\x7f\xa1\x1e" + b"v" * 4000 + b"\xbe" * 10_000),
)
flood(
    "8 KiB of commas in binary metadata",
    lambda a: opened(a.stream(), call_block(b"Nothing", [(b"a-bin", b"," * 8000)])),
)


@attack("windows of one byte: 20 connections, one answer of 512 KiB each")
async def _(port: int) -> list[Attacker]:
    attackers = await many(port, 20, window=1)
    for attacker in attackers:
        await attacker.write(opened(1, INFER) + sent(1, infer_message("grow")))
    for _ in until(SECONDS):
        for attacker in attackers:
            await attacker.write(frames.window_update(1, 1) * 50)
        await asyncio.sleep(0)
    return attackers


@attack("gzip bombs of 64 KiB for 62 MiB: 8 connections, 16 streams at a time")
async def _(port: int) -> list[Attacker]:
    attackers = await many(port, 8)
    block = call_block(b"ModelInfer", [(b"grpc-encoding", b"gzip")])
    bomb = message(gzip.compress(bytes(62 << 20), 9), compressed=True)
    pieces = [bomb[start : start + 16_000] for start in range(0, len(bomb), 16_000)]
    for _ in range(4):
        for attacker in attackers:
            for _ in range(4):
                number = attacker.stream()
                body = b"".join([sent(number, piece, end=piece is pieces[-1]) for piece in pieces])
                await attacker.write(opened(number, block) + body)
        await asyncio.sleep(SECONDS / 4)
    return attackers


@attack("slow clients: 1000 connections, a byte of a header block each second")
async def _(port: int) -> list[Attacker]:
    attackers = await many(port, 1000)
    for attacker in attackers:
        await attacker.write(frame(FrameType.HEADERS, 0, 1, INFER)[:-20])
    for _ in range(int(SECONDS)):
        for attacker in attackers:
            await attacker.write(b"x")
        await asyncio.sleep(1)
    return attackers


@attack("silent clients: 2000 connections without a preface")
async def _(port: int) -> list[Attacker]:
    attackers = [await Attacker(port).connect(silent=True) for _ in range(2000)]
    await asyncio.sleep(1)
    return attackers


@attack("cancelled work: 1000 calls of a slow model, all given up after 150 ms, again and again")
async def _(port: int) -> list[Attacker]:
    attacker = await Attacker(port).connect()
    slow = infer_message("slow")
    for _ in until(SECONDS):
        if not attacker.alive:
            break
        numbers = [attacker.stream() for _ in range(1000)]
        await attacker.write(b"".join([opened(n, INFER) + sent(n, slow) for n in numbers]))
        await asyncio.sleep(0.15)
        await attacker.write(b"".join([frames.reset(n, 8) for n in numbers]))
    return [attacker]
