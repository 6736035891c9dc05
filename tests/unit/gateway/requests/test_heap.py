"""What the C library does with the memory of large bodies."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

BODIES = """
import resource, sys
from penstock.gateway.requests.heap import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def handled():
    b"".join((b"x", bytes(bytearray(600_000))))
handled()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    handled()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", BODIES, how], check=True, capture_output=True, text=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_the_memory_of_a_body_is_used_again_for_the_next_one() -> None:
    assert page_faults("kept") * 20 < page_faults("as it is")
