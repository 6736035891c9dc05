"""Embeddings beside sentence-transformers: `python loadtest/benchmarks embeddings MODEL --peer-python PYTHON`.

Servers are asked over HTTP, one text in a request, by so many clients as are in flight. sentence-transformers gets as
many texts at once in its own process, which spares it the waiting, the protocol and the client. They take turns.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import statistics
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from penstock.tokenizers import Tokenizer

_LENGTHS = (16, 64, 256, 512)
_IN_FLIGHT = (1, 8, 64)
_TEXTS = 64
_LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")
Measure = Callable[[Sequence[str], int, float], float]
"""Texts per second of these texts, so many in flight, over so many seconds."""


def main(settings: Mapping[str, Any]) -> int:
    folder, seconds = Path(settings["model"]), settings["seconds"]
    texts = {length: _texts(folder, length) for length in _LENGTHS}
    with ExitStack() as stack:
        measured: dict[str, Measure] = {"sentence-transformers": _peer(stack, settings["peer_python"], folder)}
        for dtype in ("f32", "bf16"):
            measured[dtype] = _server(stack, folder, dtype)
        for name, url, model in settings["beside"]:
            measured[name] = _asking(url, model)
        print(f"| tokens | in flight | {' | '.join(measured)} |\n|{'---:|' * (2 + len(measured))}")
        for length, in_flight in itertools.product(_LENGTHS, _IN_FLIGHT):
            rates: dict[str, list[float]] = {name: [] for name in measured}
            for _ in range(settings["repeat"]):
                for name, measure in measured.items():
                    rates[name].append(measure(texts[length], in_flight, seconds))
            row = " | ".join(f"{statistics.median(values):.1f}" for values in rates.values())
            print(f"| {length} | {in_flight} | {row} |", flush=True)
    return 0


def _texts(folder: Path, length: int) -> list[str]:
    """Of so many tokens each, special tokens included."""
    tokenizer = Tokenizer(folder)
    words = sorted(set(re.findall("[a-z]{4,}", Path(__file__).read_text())))
    rng = random.Random(length)
    texts = []
    for _ in range(_TEXTS):
        text = ""
        while len(tokenizer.encode(longer := f"{text} {rng.choice(words)}".strip())) <= length:
            text = longer
        texts.append(text)
    return texts


def _peer(stack: ExitStack, python: str, folder: Path) -> Measure:
    command = [python, str(Path(__file__).with_name("peer.py")), str(folder), str(max(_LENGTHS))]
    process = stack.enter_context(
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    )
    stack.callback(process.kill)
    print(f"sentence-transformers {_line(process)}")

    def measure(texts: Sequence[str], in_flight: int, seconds: float) -> float:
        assert process.stdin is not None
        process.stdin.write(json.dumps({"texts": texts, "batch": in_flight, "seconds": seconds}) + "\n")
        return float(_line(process))

    return measure


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("sentence-transformers ended")
    return line.strip()


def _server(stack: ExitStack, folder: Path, dtype: str) -> Measure:
    flags = ["--http-port", "0", "--no-allow-grpc", "--no-allow-metrics", "--access-log", "off", "--dtype", dtype]
    flags += ["--served-model-name", "m", "--max-model-len", str(max(_LENGTHS))]
    command = [sys.executable, "-m", "penstock.gateway.cli", "serve", str(folder), *flags]
    process = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    stack.callback(process.terminate)
    port = 0
    for line in process.stderr or ():
        match = _LISTENING.search(line)
        port = int(match[1]) if match else port
        if "ready: " in line:
            return _asking(f"http://127.0.0.1:{port}/v1/embeddings", "m")
    raise RuntimeError("the server ended")


def _asking(url: str, model: str) -> Measure:
    where = urllib.parse.urlsplit(url)
    assert where.hostname is not None
    host, port, path = where.hostname, where.port or 80, where.path

    def measure(texts: Sequence[str], in_flight: int, seconds: float) -> float:
        bodies = [json.dumps({"model": model, "input": text, "encoding_format": "base64"}).encode() for text in texts]
        return asyncio.run(_ask(host, port, path, bodies, in_flight, seconds))

    return measure


async def _ask(host: str, port: int, path: str, bodies: Sequence[bytes], in_flight: int, seconds: float) -> float:
    """Connections are kept, and each sends its next text when it has the vector of the last one."""
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: ".encode()
    numbers = itertools.count()
    begin = time.perf_counter()

    async def client() -> None:
        reader, writer = await asyncio.open_connection(host, port)
        while time.perf_counter() - begin < seconds:
            body = bodies[next(numbers) % len(bodies)]
            writer.write(head + b"%d\r\n\r\n" % len(body) + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            if not answer.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(answer.decode())
            length = re.search(rb"content-length: (\d+)", answer, re.IGNORECASE)
            assert length is not None
            await reader.readexactly(int(length[1]))
        writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(client())
    return next(numbers) / (time.perf_counter() - begin)
