"""Workers of several devices have processes of their own, which hold memory for as long as they live."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from typing import Any

ENGINE_PROCESS = """
import multiprocessing, os, signal, sys
from penstock.engines.vllm.worker import WorkerExtension

def stuck():
    WorkerExtension()
    os.write(int(sys.argv[1]), b"%d" % os.getpid())
    signal.pause()

multiprocessing.get_context("fork").Process(target=stuck).start()
signal.pause()
"""


def test_a_worker_that_is_stuck_ends_with_the_engine_process(needs_vllm: Any) -> None:
    """vLLM's own workers look for the engine process only while they wait for a step."""
    told, tell = os.pipe()
    engine = subprocess.Popen([sys.executable, "-c", ENGINE_PROCESS, str(tell)], pass_fds=[tell])
    os.close(tell)
    worker = os.pidfd_open(int(os.read(told, 20)))
    os.close(told)
    engine.kill()
    engine.wait()
    ended, _, _ = select.select([worker], [], [], 20)
    if not ended:
        signal.pidfd_send_signal(worker, signal.SIGKILL)
    os.close(worker)
    assert ended
