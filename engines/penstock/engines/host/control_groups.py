"""The control groups that bound this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def group_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """Folders of the groups that this process is in, its own first, then each parent's, with the version (1 or 2) of
    what they hold. `controller`: memory or cpu. `root` is where /proc and /sys are looked for.

    In a container its own group is often mounted at the root, so folders may be named that do not exist.
    """
    base = root / "sys/fs/cgroup"
    for path, version in _memberships(controller, root):
        top = base if version == 2 else base / controller
        folder = top / path.strip("/")
        yield from ((each, version) for each in (folder, *folder.parents) if each.is_relative_to(top))


def _memberships(controller: str, root: Path) -> Iterator[tuple[str, int]]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = ["0::/", f"1:{controller}:/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield path, 2
        elif controller in controllers.split(","):
            yield path, 1
