"""What an open console costs a server: its CPU time with and without one, in turns, while 256 streams run; and how many
bytes the page has. `python tests/console/measure.py [--seconds 10] [--turns 3]`."""

from __future__ import annotations

import argparse
import http.client
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import psutil

PORT = 23410
FILES = (
    "",
    "/console.css",
    "/app.js",
    "/dom.js",
    "/feed.js",
    "/format.js",
    "/live.js",
    "/overview.js",
    "/playground.js",
    "/plot.js",
    "/requests.js",
    "/session.js",
    "/tensors.js",
)


def cpu_seconds(process: psutil.Process) -> float:
    """Of the server and of its engine."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def page_bytes(encoding: str) -> int:
    """Bodies of all files of the page."""
    total = 0
    with closing(http.client.HTTPConnection("127.0.0.1", PORT)) as connection:
        for file in FILES:
            connection.request("GET", "/console" + file, headers={"Accept-Encoding": encoding})
            answer = connection.getresponse()
            total += len(answer.read())
            if answer.status != 200:
                raise SystemExit(f"/console{file}: status {answer.status}")
    return total


@contextmanager
def console(view: str | None) -> Iterator[list[int]]:
    """One that looks at this; None: nobody looks. Gives the bytes that come."""
    count = [0]
    if view is None:
        yield count
        return
    connection = http.client.HTTPConnection("127.0.0.1", PORT)
    connection.request("GET", f"/console/live?view={view}", headers={"x-penstock-console": "1"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(answer.read().decode())

    def read() -> None:
        with suppress(Exception):
            while data := answer.read1(1 << 16):
                count[0] += len(data)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    yield count
    if connection.sock is not None:
        connection.sock.shutdown(2)
    connection.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--streams", type=int, default=256)
    args = parser.parse_args()
    command = [sys.executable, "-m", "penstock.gateway.cli", "serve", "--engine", "simulated", "--sim-step-ms", "20"]
    command += ["--num-kv-blocks", "40000"]
    command += ["--http-port", str(PORT), "--no-allow-grpc", "--no-allow-metrics", "--access-log", "off"]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    load = None
    try:
        wait_until_ready()
        print(f"page: {page_bytes('identity'):,} bytes, {page_bytes('gzip'):,} with gzip")
        load = start_load(args.streams)
        process = psutil.Process(server.pid)
        time.sleep(15)
        found: dict[str, list[float]] = {"none": [], "live": [], "overview": []}
        for _ in range(args.turns):
            for view in found:
                with console(None if view == "none" else view) as count:
                    time.sleep(1)
                    before, began, came = cpu_seconds(process), time.monotonic(), count[0]
                    time.sleep(args.seconds)
                    took = time.monotonic() - began
                    share = 100 * (cpu_seconds(process) - before) / took
                found[view].append(share)
                print(f"{view:9} {share:6.2f} % of a core, {(count[0] - came) / took:10,.0f} bytes/s", flush=True)
        for view, shares in found.items():  # within a turn: the machine's speed changes from turn to turn
            ratios = [100 * (share / base - 1) for share, base in zip(shares, found["none"], strict=True)]
            median = statistics.median(shares)
            print(f"median {view:9} {median:6.2f} % of a core ({statistics.median(ratios):+.2f} %)")
    finally:
        for each in (load, server):
            if each is not None:
                each.terminate()
                each.wait()


def wait_until_ready() -> None:
    for _ in range(300):
        time.sleep(0.2)
        with suppress(OSError), closing(http.client.HTTPConnection("127.0.0.1", PORT)) as connection:
            connection.request("GET", "/health/ready")
            if connection.getresponse().status == 200:
                return
    raise SystemExit("the server does not become ready")


def start_load(streams: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "penstock.gateway.cli", "loadtest", "--url", f"http://127.0.0.1:{PORT}"]
    command += [
        "--concurrency",
        str(streams),
        "--prompt-tokens",
        "64",
        "--output-tokens",
        "2200",
        "--duration",
        "1h",
        "--warmup",
        "0",
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
