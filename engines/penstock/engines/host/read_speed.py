"""A measurement of how fast this machine reads memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from penstock.engines.host.memory import available_memory

_MOST_BYTES = 1 << 30
"""Of the memory that is read: more than caches hold."""
_SECONDS = 0.1
"""Least that one measurement takes: threads start within a hundredth of it."""

Clock = Callable[[], float]


def read_speeds(num_bytes: int, threads: int, repeats: int, clock: Clock = time.perf_counter) -> list[float]:
    """Bytes per second of `threads` that read so many bytes over and over, each its own part: as a step reads weights.

    Fewer bytes than the caches hold come from these. Of a lot, 1 GiB or a quarter of the free memory stands for all.
    """
    size = max(threads, min(num_bytes, _MOST_BYTES, available_memory() // 4))
    memory = np.ones(size, np.uint8)
    parts = np.array_split(memory, threads)
    _read(parts, 1, clock)
    times = max(1, round(_SECONDS / max(_read(parts, 1, clock), 1e-6)))
    return [size * times / _read(parts, times, clock) for _ in range(repeats)]


def _read(parts: list[npt.NDArray[np.uint8]], times: int, clock: Clock) -> float:
    """Seconds until all threads have read their part so many times."""
    barrier = threading.Barrier(len(parts) + 1)

    def read(part: npt.NDArray[np.uint8]) -> None:
        barrier.wait()
        for _ in range(times):
            part.max()  # numpy lets the other threads run meanwhile

    workers = [threading.Thread(target=read, args=(part,)) for part in parts]
    for worker in workers:
        worker.start()
    barrier.wait()
    started = clock()
    for worker in workers:
        worker.join()
    return max(clock() - started, 1e-9)
