"""The models that a front leaves to the model host, as its KServe handlers find them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.classic.base import InferModel, SaysReady
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.model_config import ModelConfig
from penstock.classic.signature import ModelSignature
from penstock.classic.statistics import ModelStatistics
from penstock.gateway.processes.model_host.messages import Described, Published
from penstock.gateway.processes.model_host.remote_calls import RemoteCalls, RemoteStream


@dataclass(slots=True, eq=False)
class Description:
    """What the host has told of a model version. All of its RemoteModels share it."""

    name: str
    version: int
    config: ModelConfig
    signature: ModelSignature
    takes_infer: bool
    folder: Path | None
    sources: dict[str, tuple[str, int, str]]
    """Of an ensemble's outputs: model, version and output that they come from."""
    ready: bool = False
    says_ready: bool = True


class RemoteModel(SaysReady):
    """Implements InferModel. The host validates, queues, batches and executes; one of these costs next to nothing, so
    that a request can have its own, which says afterwards which version has answered."""

    __slots__ = ("_calls", "_description", "_models", "_version_name", "version")

    def __init__(self, models: RemoteModels, calls: RemoteCalls, description: Description, version_name: str) -> None:
        """`version_name`: the version as the caller has named it; "" for the newest."""
        self._models = models
        self._calls = calls
        self._description = description
        self._version_name = version_name
        self.version = description.version

    @property
    def name(self) -> str:
        return self._description.name

    @property
    def config(self) -> ModelConfig:
        return self._description.config

    @property
    def signature(self) -> ModelSignature:
        return self._description.signature

    @property
    def ready(self) -> bool:
        return self._description.ready and not self._calls.closed

    @property
    def says_ready(self) -> bool:
        return self._description.says_ready

    @property
    def takes_infer(self) -> bool:
        return self._description.takes_infer

    @property
    def model_folder(self) -> Path | None:
        return self._description.folder

    @property
    def statistics(self) -> ModelStatistics:
        """None: the host counts."""
        return ModelStatistics()

    def source(self, output: str) -> tuple[InferModel, str] | None:
        """Of an ensemble's output: the model and its output that it comes from; None when it is gone."""
        source = self._description.sources.get(output)
        if source is None:
            return None
        name, version, theirs = source
        model = self._models.find(name, str(version))
        return None if model is None else (model, theirs)

    async def infer(self, request: InferRequest) -> InferResponse:
        version, response = await self._calls.infer(request, self.name, self._version_name, self.version)
        self.version = version
        return response

    def stream(self, request: InferRequest) -> RemoteStream:
        return self._calls.stream(request, self.name, self._version_name, self.version)

    async def stop(self) -> None:
        """Nothing: the host stops its models."""


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
            description = kept[key] = self._described[key]
            description.ready, description.says_ready = ready, says_ready
            by_version[description.name, str(description.version)] = description
            newest = by_version.get((description.name, ""))
            if newest is None or newest.version < description.version:
                by_version[description.name, ""] = description
        self._described, self._by_version = kept, by_version

    def has(self, name: str, version: str) -> bool:
        """Whether the host would run a request now; `version` is a text in a request, "" for the newest."""
        description = self._by_version.get((name, version))
        return description is not None and description.ready and not self._calls.closed

    def find(self, name: str, version: str) -> RemoteModel | None:
        """One for a request of its own. None: only the host knows what is wrong with the name or version."""
        description = self._by_version.get((name, version))
        return None if description is None else RemoteModel(self, self._calls, description, version)
