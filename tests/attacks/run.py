"""Attacks a real server, one attack after the other: `python tests/attacks/run.py [WORDS]` prints what each has cost.

Memory is what the server process has more than before, at most during the attack and three seconds after the attackers
have gone; times are those of another client's calls meanwhile, median and 99th percentile. Only attacks whose name has
one of the words are run.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import psutil

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from attacks import ATTACKS  # noqa: E402
from support.server import serving  # noqa: E402

MIB = 1 << 20
FLAGS = ("--model-repository", str(HERE / "models"), "--body-memory", str(256 * MIB))


async def peak(process: psutil.Process, ended: asyncio.Event) -> float:
    most = 0
    while not ended.is_set():
        most = max(most, process.memory_info().rss)
        await asyncio.sleep(0.05)
    return most / MIB


async def measured(name: str, port: int, process: psutil.Process) -> str:
    probe = await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / "probe.py"), f"127.0.0.1:{port}", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert probe.stdout is not None
    await probe.stdout.readline()
    before, cpu = process.memory_info().rss / MIB, sum(process.cpu_times()[:2])
    ended = asyncio.Event()
    memory = asyncio.create_task(peak(process, ended))
    used = await ATTACKS[name](port)
    await asyncio.sleep(0.5)
    ended.set()
    cut = sum(not attacker.alive for attacker in used)
    for attacker in used:
        attacker.close()
    printed, _ = await probe.communicate(b"stop\n")
    other = json.loads(printed)
    await asyncio.sleep(3)
    after, spent = process.memory_info().rss / MIB, sum(process.cpu_times()[:2]) - cpu
    times = f"{other['median'] * 1000:.0f} / {other['p99'] * 1000:.0f} ms, {other['failed']} failed"
    most = f"{await memory - before:+.0f} | {after - before:+.0f}"
    return f"| {name} | {most} | {spent:.1f} s | {cut} of {len(used)} | {times} |"


async def main() -> None:
    words = sys.argv[1:]
    print("| attack | MiB at most | after | CPU | connections ended by the server | another client |")
    print("|---|---|---|---|---|---|")
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
