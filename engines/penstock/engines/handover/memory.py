"""The shared memory through which engines hand over blocks, as its owner, the process that starts them, has it."""

from __future__ import annotations

import os
import secrets
import weakref

from penstock.engines.handover.settings import HandoverConfig, Region

_KEY_BYTES = 32


class HandoverMemory:
    """Has no name in the file system, and ends with the last process that has it open. Engines find it by way of this
    process (/proc/PID/fd), so only those of the same user can; one that is restarted finds what it wrote before."""

    def __init__(self, num_regions: int, num_bytes: int) -> None:
        """`num_bytes`: most of all regions together; nothing is taken before blocks are written. Raises OSError."""
        self._descriptors: list[int] = []
        self._num_bytes = num_bytes
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._close = weakref.finalize(self, _close, self._descriptors)
        for number in range(num_regions):
            for part in ("blocks", "index"):
                self._descriptors.append(os.memfd_create(f"penstock-handover-{number}-{part}", os.MFD_CLOEXEC))

    def config(self, own: int | None) -> HandoverConfig:
        """Of an engine that writes this region, or none."""
        paths = [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in self._descriptors]
        regions = tuple(Region(*pair) for pair in zip(paths[::2], paths[1::2], strict=True))
        return HandoverConfig(regions=regions, region_bytes=self._num_bytes // len(regions), own=own, key=self._key)

    def clear(self) -> None:
        """Gives the memory back. No engine is there."""
        for descriptor in self._descriptors:
            os.ftruncate(descriptor, 0)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
