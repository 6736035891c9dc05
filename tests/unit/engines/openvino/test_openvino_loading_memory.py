"""What a process that loads a model gives back while it does so."""

from __future__ import annotations

import mmap
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from penstock.engines.contract.loading import Loading
from penstock.engines.host.memory import resident_memory
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.process_memory import mapped_pages_released, return_freed_memory
from penstock.engines.openvino.runner import OpenVINORunner
from support.models import make_model

MIB = 1 << 20
THREAD = "penstock-mapped-pages"


def running() -> bool:
    return any(thread.name == THREAD for thread in threading.enumerate())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_that_were_read_leave_while_the_work_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(64 * MIB))
    with (tmp_path / "file").open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    released = threading.Semaphore(0)

    def release() -> None:
        mapping.madvise(mmap.MADV_DONTNEED)
        released.release()

    values = np.frombuffer(mapping, np.uint8)
    before = resident_memory().file
    with mapped_pages_released(release, interval=0.001):
        assert not values.any()
        while released.acquire(blocking=False):
            pass
        for _ in range(2):  # the first one may have begun before all pages were read
            assert released.acquire(timeout=30)
        assert resident_memory().file - before < 16 * MIB
    assert not running()


def test_the_thread_ends_with_a_failure_and_pages_are_released_once_more() -> None:
    calls: list[bool] = []
    with pytest.raises(RuntimeError), mapped_pages_released(lambda: calls.append(running()), interval=1000.0):
        raise RuntimeError
    assert calls == [False]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_memory_goes_back() -> None:
    parts = [np.ones(100_000, np.uint8) for _ in range(1000)]  # below the size that has a mapping of its own
    kept = parts[::10]
    before = resident_memory().anonymous
    del parts
    return_freed_memory()
    assert before - resident_memory().anonymous > 50 * MIB
    assert len(kept) == 100


def test_while_a_model_is_loaded(tmp_path: Path) -> None:
    seen: dict[str, bool] = {}

    def report(loading: Loading) -> None:
        seen[loading.stage] = running()

    OpenVINORunner(OpenVINOConfig(make_model(tmp_path), threads=1, num_blocks=8), report).close()
    assert seen == {"weights": True, "compile": True, "warm-up": True}
    assert not running()
