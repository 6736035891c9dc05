"""A front's end of the border: what its KServe handlers take, as if the models were here."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable

from penstock.gateway.apis.kserve.shared_memory import RegionStatus, SharedMemoryRegions
from penstock.gateway.apis.kserve.tracing import SharedTracing, Tracing
from penstock.gateway.processes.model_host.connection import HostConnection
from penstock.gateway.processes.model_host.messages import (
    Described,
    DownMessage,
    Known,
    Published,
    RegionFields,
    Response,
    Traced,
)
from penstock.gateway.processes.model_host.remote_calls import RemoteCalls
from penstock.gateway.processes.model_host.remote_models import RemoteModels

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
        by_name = {region.name: region for region in regions}
        for name in [name for name, region in self._adopted.items() if by_name.get(name) != region]:
            del self._adopted[name]
            self._regions.forget(name)
        for name, region in by_name.items():
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


_REPORT_SECONDS = 0.1
"""Between looks whether requests still use regions of shared memory that are unregistered."""


class HostLink:
    """`models`, `shared_memory` and `tracing` are for a KServe context that answers inference: they know what there is
    when the first Published has come."""

    def __init__(self, connection: HostConnection, first_trace: int, host: int, *, allow_client_shm: bool) -> None:
        """The messages that come over the connection are for `heard`, its end for `lost`. `host` is the other side's
        process id."""
        self.calls = RemoteCalls(connection)
        self.models = RemoteModels(self.calls)
        self.shared_memory = SharedMemoryRegions(allow_client_shm)
        self.tracing = Tracing(write=self._write_traces, first_number=first_trace)
        self._regions = FrontRegions(self.shared_memory, host)
        self._connection = connection
        self._tracing: SharedTracing | None = None
        self._known = Known(0)
        self._leaving: list[str] = []
        self._report: asyncio.TimerHandle | None = None

    def heard(self, message: DownMessage, tail: memoryview) -> None:
        """Raises ValueError, LookupError and TypeError for a message that no host sends."""
        if isinstance(message, Response):
            self.calls.responded(message, tail)
        elif isinstance(message, Described):
            self.models.describe(message)
        elif isinstance(message, Published):
            self._publish(message)

    def lost(self) -> None:
        """Ends all requests."""
        if self._report is not None:
            self._report.cancel()
        self.calls.lost()

    def _publish(self, message: Published) -> None:
        self.models.publish(message)
        self._regions.publish(message.regions)
        if message.tracing is not None and message.tracing != self._tracing:
            self._tracing = message.tracing
            self.tracing.adopt(message.tracing)
        self._leaving = message.leaving
        self._tell(Known(message.generation, self._regions.used(message.leaving)))

    def _tell(self, known: Known) -> None:
        """What this front knows, and from time to time which of the regions that leave it uses."""
        if known != self._known:
            self._known = known
            self._connection.send(known)
        if self._report is not None:
            self._report.cancel()
            self._report = None
        if known.regions:
            self._report = asyncio.get_running_loop().call_later(_REPORT_SECONDS, self._tell_again)

    def _tell_again(self) -> None:
        self._tell(Known(self._known.generation, self._regions.used(self._leaving)))

    def _write_traces(self, model: str, traces: list[list[bytes]], log_frequency: int) -> None:
        self._connection.send(Traced(model, traces))
