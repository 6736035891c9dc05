"""A soak: mixed clients for minutes, and a verdict on leaks: `python tests/soak/soak.py [--seconds 600]`.

Threads send the recorded exchanges (tests/exchanges) in random order, all protocols at once, and a few leave midway.
The server passes if every answer is the recorded one and nothing is left when the clients have gone: memory of each
process no larger in the last quarter than in the second one, no more open files, threads or shared memory than after
the first minutes, all blocks of the KV cache back, no request running, no error on the log. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from exchanges.exchange import Exchange, over_http2, without_framing  # noqa: E402
from exchanges.test_exchanges import GROUPS, flags, recorded  # noqa: E402
from support.server import Server, serving, wait_until  # noqa: E402

MIB = 1 << 20
CLIENTS = 6
GROWTH, GROWTH_AT_FIRST = 0.03, 0.15
"""Share of its memory that a process may gain between the second and the last quarter, and 4 MiB beside it: allocators
keep what they have had, and most of that comes in the first minutes."""
FIRST_SECONDS = 300
FIRST_EXCHANGES = 1500
"""Before the first sample: however slow the machine is, allocators have had the most of what they take then."""
BOUNDS = ("--stored-responses", "20", "--data-memory", "1MiB", "--kv-cache-memory", "64MiB")
"""Small ones, so that stores and the cache are full before the second quarter begins."""
UNKNOWN_MODEL = "failed to load 'nowhere'"
"""The one error that the exchanges ask for."""
SHARED = {"batches: none", "completions: a client that leaves", "batches: one line of two is bad"}
"""Exchanges whose answers depend on what other clients do."""


@dataclass
class Samples:
    """What the server's processes hold, taken every second: bytes per process, and handles of all."""

    memory: dict[int, list[int]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def take(self, processes: list[psutil.Process]) -> None:
        for process in processes:
            self.names.setdefault(process.pid, " ".join(process.cmdline()[1:4])[:60])
            self.memory.setdefault(process.pid, []).append(process.memory_full_info().uss)

    def growth(self) -> Iterator[tuple[str, float, float]]:
        """Name, MiB in the second quarter, MiB in the last one; medians."""
        for pid, values in self.memory.items():
            quarter = max(1, len(values) // 4)
            early, late = values[quarter : 2 * quarter], values[-quarter:]
            yield self.names[pid], statistics.median(early or values) / MIB, statistics.median(late) / MIB


def processes_of(server: Server) -> list[psutil.Process]:
    own = psutil.Process(server.process.pid)
    return [own, *own.children(recursive=True)]


def handles(server: Server) -> Counter[str]:
    counts: Counter[str] = Counter()
    segments = set()
    for process in processes_of(server):
        counts["processes"] += 1
        counts["open files"] += process.num_fds()
        counts["threads"] += process.num_threads()
        segments |= {mapped.path for mapped in process.memory_maps() if mapped.path.startswith("/dev/shm")}
    return counts + Counter({"shared memory": len(segments)})


class Clients:
    """Threads that send exchanges until `stop` is set; `wrong` has the answers that are not as recorded."""

    def __init__(self, server: Server, seed: int) -> None:
        self.stop = threading.Event()
        self.sent: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self._server = server
        self._seed = seed
        self._answers = {name: answer for group in GROUPS for name, answer in recorded(group).items()}
        self._exchanges = [exchange for exchanges in GROUPS.values() for exchange in exchanges]

    def run(self, number: int) -> None:
        chance = random.Random(f"{self._seed} {number}")
        while not self.stop.is_set():
            exchange = chance.choice(self._exchanges)
            self.sent[exchange.name] += 1
            try:
                right = exchange.name in SHARED or self._is_right(exchange, by_http2=chance.random() < 0.3)
            except Exception as error:
                print(f"{exchange.name}: {error!r}", file=sys.stderr)
                right = False
            self.wrong[exchange.name] += not right

    def _is_right(self, exchange: Exchange, by_http2: bool) -> bool:
        expected = self._answers[exchange.name]
        if by_http2 and exchange.request is not None:
            answer = without_framing(over_http2(self._server, exchange.request))
            expected = without_framing(expected)
        else:
            answer = json.loads(json.dumps(exchange.run(self._server)))
        if answer != expected:
            print(f"{exchange.name}: {json.dumps(answer)}", file=sys.stderr)
        return bool(answer == expected)


def fill_cache(server: Server) -> None:
    """Memory of the KV cache is the engine's once a block has been written: all are, before the first sample."""
    number = 0
    while server.state()["num_cached_blocks"] < 0.9 * server.state()["num_blocks"]:
        number += 1
        prompt = f"{number} is a number. " * 250
        server.post("/v1/completions", {"model": "demo_model", "prompt": prompt, "max_tokens": 1}).raise_for_status()


def soak(server: Server, seconds: float, seed: int) -> list[str]:
    """What is wrong; empty if the server passes."""
    fill_cache(server)
    clients, samples = Clients(server, seed), Samples()
    processes = processes_of(server)
    with ThreadPoolExecutor(CLIENTS) as pool:
        for number in range(CLIENTS):
            pool.submit(clients.run, number)
        before: Counter[str] | None = None
        try:
            wait_until(lambda: clients.sent.total() >= FIRST_EXCHANGES, 600)
            begun = time.monotonic()
            while (now := time.monotonic() - begun) < seconds:
                if now >= seconds / 4 and before is None:
                    before = handles(server)
                samples.take(processes)
                clients.stop.wait(1)
        finally:
            clients.stop.set()
    wait_until(server.is_idle)
    growth = GROWTH_AT_FIRST if seconds < FIRST_SECONDS else GROWTH
    return [*problems_of(clients), *problems_of_memory(samples, growth), *left_over(server, before or Counter())]


def problems_of(clients: Clients) -> Iterator[str]:
    print(f"{clients.sent.total()} exchanges, {clients.wrong.total()} not as recorded")
    yield from (f"{name}: {count} answers are not as recorded" for name, count in clients.wrong.items() if count)


def problems_of_memory(samples: Samples, growth: float) -> Iterator[str]:
    for name, early, late in samples.growth():
        print(f"{name}: {early:.1f} MiB in the second quarter, {late:.1f} MiB in the last")
        if late > early * (1 + growth) + 4:
            yield f"{name}: memory grew from {early:.1f} to {late:.1f} MiB"


def left_over(server: Server, before: Counter[str]) -> Iterator[str]:
    """Handles at rest are compared with those under load, which had connections and their files beside them."""
    after = handles(server)
    print("under load:", dict(before), "at rest:", dict(after))
    more = [kind for kind in after if after[kind] > before[kind]]
    yield from (f"{kind}: {before[kind]} under load, {after[kind]} at rest" for kind in more)
    yield from (f"log: {line}" for line in server.log if " ERROR " in line and UNKNOWN_MODEL not in line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(*flags(Path(folder)), *BOUNDS) as server:
        problems = soak(server, arguments.seconds, arguments.seed)
    print("\n".join(problems) or "nothing leaks")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
