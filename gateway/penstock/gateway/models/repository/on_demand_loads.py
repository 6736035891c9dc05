"""A model repository as loading on demand sees it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from penstock.classic.classic_model import ClassicModel
from penstock.engines.errors import EngineError, PenstockError
from penstock.gateway.models.repository.config_file import read_config
from penstock.gateway.models.repository.listing import RepositoryListing
from penstock.gateway.models.repository.loading import LoadSlots
from penstock.gateway.models.repository.models import LoadedVersions
from penstock.gateway.models.repository.settings import RepositorySettings

logger = logging.getLogger("penstock")

_LOOK_SECONDS = 5.0
"""How often a name that is not known has the repositories looked at again."""
_LONGEST_LOOK_SECONDS = 10.0
"""After so long nobody waits for a look: a storage that hangs must not hold up requests for other names."""


class ModelChanges(Protocol):
    """What of the repository changes models."""

    def deployment(self, name: str) -> LoadedVersions | None: ...

    def is_changing(self, name: str) -> bool:
        """It is being loaded again, or for an ensemble that is."""
        ...

    async def load_stored(self, name: str) -> None: ...

    def retire(self, name: str, reason: str) -> Awaitable[None]: ...


class OnDemandLoads:
    """Implements Loads. `generating`: the names of the backends of language models, and that of other servers' models
    last."""

    def __init__(
        self,
        operations: ModelChanges,
        listing: RepositoryListing,
        slots: LoadSlots,
        settings: RepositorySettings,
        generating: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._operations = operations
        self._listing = listing
        self._slots = slots
        self._settings = settings
        self._generating = frozenset(generating)
        self._upstream = generating[-1] if generating else None
        self._clock = clock
        self._looked = clock()
        self._looking: asyncio.Task[None] | None = None
        self._backends: dict[str, str] = {}
        """As configurations name them; "" for those that do not, or cannot be read."""

    async def look(self) -> None:
        """What there is. Reads the configurations of models on this machine's disks, each once."""
        await asyncio.to_thread(self._read_backends)

    async def exists(self, name: str) -> bool:
        idle = self._looking is None or self._looking.done()
        if name not in self._listing and idle and self._clock() - self._looked >= _LOOK_SECONDS:
            self._looked = self._clock()
            self._looking = asyncio.create_task(self._look_again())
        if name not in self._listing and self._looking is not None:
            left = self._looked + _LONGEST_LOOK_SECONDS - self._clock()
            await asyncio.wait((self._looking,), timeout=max(0.0, left))  # one look for all that ask
        return name in self._listing

    async def _look_again(self) -> None:
        try:
            await asyncio.to_thread(self._listing.refresh)
        except EngineError as error:
            logger.warning("the model repositories could not be read: %s", error.message)
        else:
            await self.look()

    def generates(self, name: str) -> bool | None:
        serving = self._operations.deployment(name)
        if serving is not None:
            return any(model.config.backend in self._generating for model in serving.models.values())
        backend = self._backends.get(name)
        return None if backend is None else backend in self._generating

    def is_upstream(self, name: str) -> bool:
        return self._upstream is not None and self._backends.get(name) == self._upstream

    def stored(self) -> list[str]:
        return sorted(self._listing.names)

    def knows(self, name: str) -> bool:
        return name in self._listing

    def serves(self, name: str) -> bool:
        return self._operations.deployment(name) is not None

    def is_busy(self, name: str) -> bool:
        serving = self._operations.deployment(name)
        models = serving.models.values() if serving is not None else ()
        if any(isinstance(model, ClassicModel) and model.has_open_sequences for model in models):
            return True
        return self._operations.is_changing(name)

    def keeps_sequences(self, name: str) -> bool:
        serving = self._operations.deployment(name)
        models = serving.models.values() if serving is not None else ()
        return any(model.config.HasField("sequence_batching") for model in models)

    async def load_stored(self, name: str) -> None:
        await self._operations.load_stored(name)

    def retire(self, name: str, reason: str) -> Awaitable[None]:
        return self._operations.retire(name, reason)

    def without_slot(self) -> AbstractAsyncContextManager[None]:
        return self._slots.lent()

    def _read_backends(self) -> None:
        names = self._listing.names
        for name in names - self._backends.keys():
            folder = self._listing.local_folder(name)
            if folder is not None:
                try:
                    config = read_config(folder, name, override=None, config_name=self._settings.config_name)
                    self._backends[name] = config.backend
                except PenstockError:  # loading it will tell
                    self._backends[name] = ""
        for name in self._backends.keys() - names:
            del self._backends[name]
