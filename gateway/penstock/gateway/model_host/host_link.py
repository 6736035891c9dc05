"""A front's end of the border: what its KServe handlers take, as if the models were here."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from penstock.engines.errors import NotReadyError
from penstock.gateway.kserve.shared_memory import RegionStatus, SharedMemoryRegions
from penstock.gateway.kserve.tracing import SharedTracing, Tracing
from penstock.gateway.model_host.connection import Connection
from penstock.gateway.model_host.messages import (
    Described,
    DownMessage,
    Known,
    Published,
    RegionFields,
    Response,
    Traced,
    decode_down,
)
from penstock.gateway.model_host.remote_calls import RemoteCalls
from penstock.gateway.model_host.remote_models import RemoteModels
from penstock.gateway.model_host.socket_file import connect

logger = logging.getLogger(__name__)


class FrontRegions:
    """Keeps a front's `SharedMemoryRegions` as the host's are."""

    def __init__(self, regions: SharedMemoryRegions, host: int) -> None:
        """`host` is the process id."""
        self._regions = regions
        self._host = host
        self._adopted: dict[str, RegionFields] = {}

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


_TRACES_OF_A_FRONT = 1 << 32
"""The numbers of its traces begin at a multiple of this."""


class HostLink:
    """`models`, `shared_memory` and `tracing` are for a KServe context that answers inference. Made by `open`."""

    def __init__(self, number: int, host: int, allow_client_shm: bool) -> None:
        """`number` is this front's, from 1 on, `host` the other side's process id."""
        self.calls = RemoteCalls()
        self.models = RemoteModels(self.calls)
        self.shared_memory = SharedMemoryRegions(allow_client_shm)
        self.tracing = Tracing(write=self._write_traces, first_number=(number - 1) * _TRACES_OF_A_FRONT + 1)
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the host has gone."""
        self._regions = FrontRegions(self.shared_memory, host)
        self._connection: Connection[DownMessage]
        self._told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tracing: SharedTracing | None = None

    @classmethod
    async def open(cls, path: Path, *, allow_client_shm: bool = False) -> HostLink:
        """Returns when the front knows what there is. Raises NotReadyError."""
        joined = await asyncio.to_thread(connect, path)
        link = cls(joined.number, joined.host, allow_client_shm)
        files = joined.receive_file, joined.send_file
        link._connection = Connection(*files, decode_down, link._heard, link._lost)
        link.calls.attach(link._connection)
        await link._connection.open(joined.sock)
        await link._told
        return link

    def close(self) -> None:
        """Ends all requests."""
        self._connection.close()

    def _heard(self, message: DownMessage, tail: memoryview) -> None:
        """Raises ValueError, LookupError and TypeError for a message that no host sends."""
        if isinstance(message, Response):
            self.calls.responded(message, tail)
        elif isinstance(message, Described):
            self.models.describe(message)
        elif isinstance(message, Published):
            self._publish(message)

    def _publish(self, message: Published) -> None:
        self.models.publish(message)
        self._regions.publish(message.regions)
        if message.tracing is not None and message.tracing != self._tracing:
            self._tracing = message.tracing
            self.tracing.adopt(message.tracing)
        self._connection.send(Known(message.generation))
        if not self._told.done():
            self._told.set_result(None)

    def _write_traces(self, model: str, traces: list[list[bytes]], log_frequency: int) -> None:
        self._connection.send(Traced(model, traces))

    def _lost(self) -> None:
        self.calls.lost()
        if not self._told.done():
            self._told.set_exception(NotReadyError("the model host has ended"))
        if not self.lost.done():
            self.lost.set_result(None)
