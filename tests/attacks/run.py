"""Attacks a real server, one attack after the other, and prints what each has cost: `python tests/attacks/run.py [WORDS]`.

Memory is the server process's, its highest during the attack and three seconds after the attackers have gone; times are
those of another client's calls meanwhile. Only attacks whose name contains one of the words are run.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from attacks import ATTACKS  # noqa: E402
from helpers_server import serving  # noqa: E402

MIB = 1 << 20
FLAGS = ("--model-repository", str(HERE / "models"), "--body-memory", str(256 * MIB))


async def peak(process: psutil.Process, ended: asyncio.Event) -> float:
    most = 0
    while not ended.is_set():
        most = max(most, process.memory_info().rss)
        await asyncio.sleep(0.05)
    return most / MIB


async def measured(name: str, port: int, process: psutil.Process) -> str:
    probe = subprocess.Popen(
        [sys.executable, str(HERE / "probe.py"), f"127.0.0.1:{port}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert probe.stdout is not None
    probe.stdout.readline()
    before, cpu = process.memory_info().rss / MIB, sum(process.cpu_times()[:2])
    ended = asyncio.Event()
    memory = asyncio.create_task(peak(process, ended))
    begun = time.monotonic()
    used = await ATTACKS[name](port)
    await asyncio.sleep(0.5)
    busy = (sum(process.cpu_times()[:2]) - cpu) / (time.monotonic() - begun)
    ended.set()
    cut = sum(not attacker.alive for attacker in used)
    for attacker in used:
        attacker.close()
    answer = json.loads(await asyncio.to_thread(lambda: probe.communicate("stop\n", timeout=60)[0]))
    await asyncio.sleep(3)
    after = process.memory_info().rss / MIB
    return (
        f"| {name} | {before:.0f} | {await memory - before:+.0f} | {after - before:+.0f} | {busy:.0%} | {cut} of {len(used)} "
        f"| {answer['median'] * 1000:.0f} / {answer['p99'] * 1000:.0f} ms{', FAILED ' + str(answer['failed']) if answer['failed'] else ''} |"
    )


async def main() -> None:
    words = sys.argv[1:]
    print("| attack | MiB before | at most | after | CPU | connections ended by the server | another client |")
    print("|---|---|---|---|---|---|---|")
    for name in ATTACKS:
        if words and not any(word in name for word in words):
            continue
        with serving(*FLAGS) as server:
            port = int(server.grpc.rpartition(":")[2])
            print(await measured(name, port, psutil.Process(server.process.pid)), flush=True)
        noise = [line for line in server.log if "Traceback" in line or "ERROR" in line]
        if noise:
            print(len(noise), "errors in the server's log", *noise[:5], sep="\n")


asyncio.run(main())
