"""The control groups that bound this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.engines.host.kernel_files import kernel_text


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
            yield from ((each, version) for each in (folder, *folder.parents) if each.is_relative_to(top))


def _memberships(controller: str, root: Path) -> Iterator[tuple[str, Sequence[str]]]:
    """The group's path, and what its hierarchy's folder may be called; of version 2, it has no name."""
    lines = kernel_text(root / "proc/self/cgroup").splitlines()
    for line in lines or ["0::/", f"1:{controller}:/"]:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if path and controllers == "":
            yield path, ("",)
        elif controller in controllers.split(","):
            yield path, tuple(dict.fromkeys((controller, controllers)))  # together `cpu,cpuacct`, mostly with a link
