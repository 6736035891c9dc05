"""Clients' shared memory in a front: the objects that the model host has opened."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from penstock.gateway.kserve.shared_memory import RegionStatus, SharedMemoryRegions
from penstock.gateway.model_host.messages import RegionFields

logger = logging.getLogger(__name__)


class FrontRegions:
    """Keeps a front's `SharedMemoryRegions` as the host's are."""

    def __init__(self, regions: SharedMemoryRegions, host: int) -> None:
        """`host` is the process id."""
        self._regions = regions
        self._host = host
        self._adopted: dict[str, RegionFields] = {}

    def used(self, names: Iterable[str]) -> list[str]:
        """Those of these regions that requests of this front use."""
        return [name for name in names if self._regions.is_used(name)]

    def publish(self, regions: Iterable[RegionFields]) -> None:
        wanted = {region.name: region for region in regions}
        for name in [name for name, region in self._adopted.items() if wanted.get(name) != region]:
            del self._adopted[name]
            self._regions.forget(name)
        for name, region in wanted.items():
            if name not in self._adopted and (descriptor := self._opened(region)) is not None:
                self._adopted[name] = region
                status = RegionStatus(name, region.key, region.offset, region.byte_size)
                self._regions.adopt(status, region.tenant, descriptor)

    def _opened(self, region: RegionFields) -> int | None:
        """The object itself: by the host's descriptor, where the system allows that, since the client may have removed
        its name meanwhile; else by its name, if that still leads to it."""
        for path in (f"/proc/{self._host}/fd/{region.fd}", f"/dev/shm/{region.key.lstrip('/')}"):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                continue
            file = os.fstat(descriptor)
            if (file.st_dev, file.st_ino) == (region.device, region.inode):
                return descriptor
            os.close(descriptor)
        logger.error("the shared memory region %r cannot be opened in this process", region.name)
        return None
