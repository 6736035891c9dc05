"""The models that a front leaves to the model host, as its KServe handlers find them."""

from __future__ import annotations

from pathlib import Path

from penstock.classic.model_config import ModelConfig
from penstock.classic.signature import ModelSignature
from penstock.gateway.model_host.messages import Described, Published
from penstock.gateway.model_host.remote_calls import RemoteCalls
from penstock.gateway.model_host.remote_model import Description, RemoteModel


class RemoteModels:
    """By name and version, as the host has told last. Lives on the event loop of a front process."""

    def __init__(self, calls: RemoteCalls) -> None:
        self._calls = calls
        self._described: dict[int, Description] = {}
        self._by_version: dict[tuple[str, str], Description] = {}

    def describe(self, message: Described) -> None:
        """Before the first `publish` that names it."""
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
        kept: dict[int, Description] = {}
        by_version: dict[tuple[str, str], Description] = {}
        for key, ready, says_ready in message.models:
            found = kept[key] = self._described[key]
            found.ready, found.says_ready = ready, says_ready
            by_version[found.name, str(found.version)] = found
            newest = by_version.get((found.name, ""))
            if newest is None or newest.version < found.version:
                by_version[found.name, ""] = found
        self._described, self._by_version = kept, by_version

    def has(self, name: str, version: str) -> bool:
        """Whether the host would run a request now; `version` is a text in a request, "" for the newest."""
        found = self._by_version.get((name, version))
        return found is not None and found.ready and not self._calls.closed

    def find(self, name: str, version: str) -> RemoteModel | None:
        """One for a request of its own. None: only the host knows what is wrong with the name or version."""
        found = self._by_version.get((name, version))
        return None if found is None else RemoteModel(self, self._calls, found, version)
