"""Files in which the kernel tells of processes and of the machine: /proc and /sys.

Any of them may be missing, forbidden or say something else: in sandboxes (gVisor), on WSL, on old kernels, and because
a process may end while its files are read. So nothing here raises, and a reader needs a value for "not known".
"""

from __future__ import annotations

import re
from pathlib import Path

_SIZE = re.compile(r"(?m)^(?:Node +\d+ +)?([\w()]+):\s+(\d+) kB$")


def kernel_text(path: Path) -> str:
    """Empty: the file is not there, may not be read, or its process has ended."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def kernel_number(path: Path) -> int | None:
    """The only number in a file; None for all else, such as `max`."""
    try:
        return int(kernel_text(path))
    except ValueError:
        return None


def kernel_sizes(path: Path) -> dict[str, int]:
    """Bytes by name, of the lines like `MemFree: 123 kB`."""
    return {name: int(number) * 1024 for name, number in _SIZE.findall(kernel_text(path))}
