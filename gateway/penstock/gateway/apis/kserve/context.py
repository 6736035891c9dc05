"""The parts that every KServe front works with."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.gateway.apis.kserve.shared_memory import SharedMemoryRegions
from penstock.gateway.apis.kserve.store import ModelNames, ModelStore
from penstock.gateway.apis.kserve.tensor_plane import TensorPlane
from penstock.gateway.apis.kserve.tracing import Tracing
from penstock.gateway.requests.intake import WorkPools
from penstock.gateway.requests.server_health import ServerHealth

if TYPE_CHECKING:
    from penstock.gateway.apis.kserve.logs import LogSettings

MAX_INPUT_BYTES = 64 << 20
"""Triton's default of `--http-max-input-size`."""


async def nobody_else() -> None:
    """There is only this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KServe:
    names: ModelNames
    models: ModelStore
    shared_memory: SharedMemoryRegions
    tracing: Tracing
    logs: LogSettings
    name: str = "penstock"
    """The server's, as its metadata says it (`--id`)."""
    version: str = "0"
    max_input_bytes: int = MAX_INPUT_BYTES
    """Of one request, compressed and decompressed."""
    header_forward_pattern: re.Pattern[str] | None = None
    """Names of the headers that go to the model as parameters."""
    health: ServerHealth = field(default_factory=ServerHealth)
    pools: WorkPools = field(default_factory=WorkPools)
    spread: Callable[[], Awaitable[None]] = nobody_else
    """After shared memory or the settings of traces have changed: returns when every process that answers requests
    knows, since a caller's next request may reach any of them."""
    plane: TensorPlane = field(init=False)

    def __post_init__(self) -> None:
        plane = TensorPlane(self.names, self.models, self.shared_memory, self.tracing, self.pools.tensors)
        object.__setattr__(self, "plane", plane)
