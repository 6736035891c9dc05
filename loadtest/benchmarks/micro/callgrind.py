"""Instruction counts, from valgrind's callgrind: where times are noisy, counts hardly differ from run to run.

A process that has been started with `command` says itself when counting begins and ends, by valgrind's client requests:
only what is measured is instrumented, and setting up costs little. Such a request is a sequence of instructions that
does nothing on a processor and is recognised by valgrind; it comes with every version of it (valgrind.h, "ARCHITECTURE
SPECIFICS"; callgrind.h for the requests).
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import platform
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks.micro.benchmark import Work
from penstock.loadtest.errors import LoadTestError

CALLS = 10
"""That are counted: always as many, so that counts can be compared."""

_TOTALS = re.compile(r"^totals: (\d+)", re.MULTILINE)
_CALLGRIND = ord("C") << 24 | ord("T") << 16
_START, _STOP = _CALLGRIND + 4, _CALLGRIND + 5
_X86_64 = bytes.fromhex(
    "4889f8"  # mov rax, rdi: the request, an array of six words
    "31d2"  # xor edx, edx: the answer of a processor that is not valgrind's
    "48c1c703 48c1c70d 48c1c73d 48c1c733"  # rol rdi, 3; 13; 61; 51: all around
    "4887db"  # xchg rbx, rbx: the request proper
    "4889d0"  # mov rax, rdx
    "c3"  # ret
)


def valgrind() -> str:
    """Where it is. Raises LoadTestError where nothing can be counted."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise LoadTestError("--callgrind counts instructions on Linux on x86-64 only")
    found = shutil.which("valgrind")
    if found is None:
        raise LoadTestError("--callgrind needs valgrind, which is not installed (Debian, Ubuntu: apt install valgrind)")
    return found


def command(program: Sequence[str], out: Path) -> list[str]:
    """Runs `program` within callgrind, which writes its figures to `out`. Raises as `valgrind`."""
    return [valgrind(), "-q", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}", *program]


def total(out: Path) -> int:
    """The instructions of a run. Raises LoadTestError when nothing was counted."""
    try:
        found = _TOTALS.search(out.read_text())
    except OSError:
        found = None
    if found is None or not int(found.group(1)):
        raise LoadTestError("callgrind has counted nothing")
    return int(found.group(1))


def count(work: Work) -> int:
    """Lets callgrind count `work`, after as many calls that are not counted. Returns how many operations were."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(_X86_64)
    request = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    words = ctypes.c_uint64 * 6
    start, stop = words(_START), words(_STOP)
    start_address, stop_address = ctypes.addressof(start), ctypes.addressof(stop)
    calls = CALLS if work.renew is None else 1
    collected = gc.isenabled()
    gc.disable()
    try:
        for counted in (False, True):
            if work.renew is not None:
                work.renew()
            if counted:
                request(start_address)
            for _ in range(calls):
                work.run()
        request(stop_address)
    finally:
        if collected:
            gc.enable()
    return calls * work.operations
