"""A front's end of the border: what its KServe handlers take, as if the models were here."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.engines.errors import NotReadyError
from penstock.gateway.kserve.shared_memory import SharedMemoryRegions
from penstock.gateway.kserve.tracing import SharedTracing, Tracing
from penstock.gateway.model_host.connection import Connection
from penstock.gateway.model_host.front_regions import FrontRegions
from penstock.gateway.model_host.messages import (
    Described,
    DownMessage,
    Known,
    Published,
    Response,
    Traced,
    decode_down,
)
from penstock.gateway.model_host.remote_calls import RemoteCalls
from penstock.gateway.model_host.remote_models import RemoteModels
from penstock.gateway.model_host.socket_file import connect

_REPORT_SECONDS = 0.1
"""Between looks whether requests still use regions of shared memory that are unregistered."""
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
        self._known = Known(0)
        self._leaving: list[str] = []
        self._report: asyncio.TimerHandle | None = None

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
        if self._report is not None:
            self._report.cancel()

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
        self._leaving = message.leaving
        self._tell(Known(message.generation, self._regions.used(message.leaving)))
        if not self._told.done():
            self._told.set_result(None)

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

    def _lost(self) -> None:
        if self._report is not None:
            self._report.cancel()
        self.calls.lost()
        if not self._told.done():
            self._told.set_exception(NotReadyError("the model host has ended"))
        if not self.lost.done():
            self.lost.set_result(None)
