"""The models of a server as a front process sees them: what the model host has told, and what has to be asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

from penstock.classic.base import InferModel
from penstock.classic.messages import InferRequest
from penstock.classic.model_config import ModelConfig
from penstock.classic.signature import ModelSignature
from penstock.engines.errors import ModelNotFoundError
from penstock.gateway.kserve.store import IndexEntry, ModelState
from penstock.gateway.model_host.messages import Described, Published
from penstock.gateway.model_host.remote_calls import RemoteCalls
from penstock.gateway.model_host.remote_model import Description, RemoteModel
from penstock.gateway.model_host.statistics_fields import to_statistics


class RemoteModelStore:
    """Implements ModelStore. Lives on the event loop of a front process."""

    def __init__(self, calls: RemoteCalls) -> None:
        self._calls = calls
        self._described: dict[int, Description] = {}
        self._serving: dict[str, dict[int, Description]] = {}
        self._by_version: dict[tuple[str, str], Description] = {}
        """By name and the version's text in a request; "" is the newest."""
        self._index: list[IndexEntry] = []
        self._ready = False

    # What the host says

    def describe(self, message: Described) -> None:
        config = ModelConfig.FromString(message.config)
        self._described[message.key] = Description(
            message.name,
            message.version,
            config,
            ModelSignature(config),
            message.takes_infer,
            Path(message.folder) if message.folder else None,
            message.sources,
        )

    def publish(self, message: Published) -> None:
        """Everything changes in one turn of the loop. Raises KeyError for a model that was not described."""
        serving: dict[str, dict[int, Description]] = {}
        kept: dict[int, Description] = {}
        for key, ready in message.models:
            found = kept[key] = self._described[key]
            found.ready = ready
            serving.setdefault(found.name, {})[found.version] = found
        by_version = {}
        for name, versions in serving.items():
            by_version.update({(name, str(version)): found for version, found in versions.items()})
            by_version[name, ""] = versions[max(versions)]
        self._described, self._serving, self._by_version = kept, serving, by_version
        self._ready = message.ready

    # What fronts ask

    def model(self, name: str, version: str = "", request: InferRequest | None = None) -> InferModel:
        """Only ModelNotFoundError: what is really wrong with a name or a version the host knows."""
        found = self._by_version.get((name, version))
        if found is None:
            which = f" version {version[:64]}" if version else ""
            raise ModelNotFoundError(f"Request for unknown model: '{name}'{which} is not found")
        return RemoteModel(self, self._calls, found, version)

    def known(self, name: str, version: int) -> InferModel | None:
        found = self._by_version.get((name, str(version)))
        return None if found is None else RemoteModel(self, self._calls, found, str(version))

    def versions(self, name: str) -> list[int]:
        return sorted(self._serving.get(name, ()))

    def models(self) -> Iterable[InferModel]:
        return [
            RemoteModel(self, self._calls, found, str(version))
            for _, versions in sorted(self._serving.items())
            for version, found in sorted(versions.items())
        ]

    def index(self, *, ready: bool) -> list[IndexEntry]:
        """As it was at the last `refresh`."""
        return [line for line in self._index if line.state == "READY"] if ready else list(self._index)

    async def refresh(self) -> None:
        """Asks for the index and the statistics. Raises PenstockError."""
        lines, statistics = await self._calls.ask("refresh")
        self._index = [
            IndexEntry(name, version, cast("ModelState | None", state), reason)
            for name, version, state, reason in lines
        ]
        for name, version, counters in statistics:
            found = self._serving.get(name, {}).get(version)
            if found is not None:
                found.statistics = to_statistics(counters)

    async def load(self, name: str, *, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        files = files or {}
        await self._calls.ask("load", name, config, list(files), data=list(files.values()))

    async def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        await self._calls.ask("unload", name, unload_dependents)

    @property
    def ready(self) -> bool:
        return self._ready and not self._calls.closed
