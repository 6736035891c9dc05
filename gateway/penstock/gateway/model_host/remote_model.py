"""An InferModel that is in another process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.classic.base import InferModel, SaysReady
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.model_config import ModelConfig
from penstock.classic.signature import ModelSignature
from penstock.classic.statistics import ModelStatistics
from penstock.gateway.model_host.remote_calls import RemoteCalls
from penstock.gateway.model_host.remote_stream import RemoteStream

if TYPE_CHECKING:
    from penstock.gateway.model_host.remote_models import RemoteModels


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

    __slots__ = ("_asked", "_calls", "_found", "_models", "version")

    def __init__(self, models: RemoteModels, calls: RemoteCalls, found: Description, asked: str) -> None:
        """`asked`: the version as the caller has named it; "" for the newest."""
        self._models = models
        self._calls = calls
        self._found = found
        self._asked = asked
        self.version = found.version

    @property
    def name(self) -> str:
        return self._found.name

    @property
    def config(self) -> ModelConfig:
        return self._found.config

    @property
    def signature(self) -> ModelSignature:
        return self._found.signature

    @property
    def ready(self) -> bool:
        return self._found.ready and not self._calls.closed

    @property
    def says_ready(self) -> bool:
        return self._found.says_ready

    @property
    def takes_infer(self) -> bool:
        return self._found.takes_infer

    @property
    def model_folder(self) -> Path | None:
        return self._found.folder

    @property
    def statistics(self) -> ModelStatistics:
        """None: the host counts."""
        return ModelStatistics()

    def source(self, output: str) -> tuple[InferModel, str] | None:
        """Of an ensemble's output: the model and its output that it comes from; None when it is gone."""
        source = self._found.sources.get(output)
        if source is None:
            return None
        name, version, theirs = source
        model = self._models.find(name, str(version))
        return None if model is None else (model, theirs)

    async def infer(self, request: InferRequest) -> InferResponse:
        version, response = await self._calls.infer(request, self.name, self._asked, self.version)
        self.version = version
        return response

    def stream(self, request: InferRequest) -> RemoteStream:
        return self._calls.stream(request, self.name, self._asked, self.version)

    async def stop(self) -> None:
        """Nothing: the host stops its models."""
