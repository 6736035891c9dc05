"""Files of the kernel about processes and the machine, /proc and /sys, and the control groups that bound this process.

Any of them may be missing, forbidden or say something else: in sandboxes (gVisor), on WSL, on old kernels, and because
a process may end while its files are read. So nothing here raises, and a reader needs a value for "not known".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path


def group_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """Folders of the groups that this process is in, its own first, then each parent's, with the version (1 or 2) of
    what they hold. `controller`: memory or cpu. `root` is where /proc and /sys are looked for.

    In a container its own group is often mounted at the root, so folders may be named that do not exist.
    """
    base = root / "sys/fs/cgroup"
    for path, mounts in _memberships(controller, root):
        for top in (base / mount for mount in mounts):
            folder = top / path.strip("/")
            version = 2 if top == base else 1
            yield from ((group, version) for group in (folder, *folder.parents) if group.is_relative_to(top))


def _memberships(controller: str, root: Path) -> Iterator[tuple[str, Sequence[str]]]:
    """The group's path, and what its hierarchy's folder may be called; of version 2, it has no name."""
    lines = kernel_text(root / "proc/self/cgroup").splitlines()
    for line in lines or ["0::/", f"1:{controller}:/"]:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if path and controllers == "":
            yield path, ("",)
        elif controller in controllers.split(","):
            yield path, tuple(dict.fromkeys((controller, controllers)))  # together `cpu,cpuacct`, mostly with a link


# Files in which the kernel tells of processes and of the machine: /proc and /sys.
#
# Any of them may be missing, forbidden or say something else: in sandboxes (gVisor), on WSL, on old kernels, and
# because a process may end while its files are read. So nothing here raises, and a reader needs a value for "not
# known".

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
