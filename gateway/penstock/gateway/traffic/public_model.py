"""A public name as one model of the KServe API: what is looked at before a request is there."""

from __future__ import annotations

from pathlib import Path

from penstock.classic.base import InferModel, ResponseStream, SaysReady, reports_ready
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.model_config import ModelConfig
from penstock.classic.signature import ModelSignature
from penstock.classic.statistics import ModelStatistics
from penstock.gateway.kserve.store import ServedByOthers
from penstock.gateway.traffic.target_model import TargetModel


class PublicModel(ServedByOthers, SaysReady):
    """Looks like the first of its targets that is there."""

    def __init__(self, targets: list[TargetModel]) -> None:
        """At least one."""
        self._targets = targets
        self._first = targets[0]
        self.name = self._first.name

    def others(self) -> list[InferModel]:
        return [target.model for target in self._targets]

    @property
    def version(self) -> int:
        return self._first.version

    @property
    def config(self) -> ModelConfig:
        """Under the public name."""
        found = ModelConfig()
        found.CopyFrom(self._first.config)
        found.name = self.name
        return found

    @property
    def signature(self) -> ModelSignature:
        return self._first.signature

    @property
    def ready(self) -> bool:
        return True

    @property
    def says_ready(self) -> bool:
        return any(map(reports_ready, self.others()))

    @property
    def takes_infer(self) -> bool:
        return self._first.takes_infer

    @property
    def model_folder(self) -> Path | None:
        return self._first.model_folder

    @property
    def statistics(self) -> ModelStatistics:
        return self._first.statistics

    async def infer(self, request: InferRequest) -> InferResponse:
        """Of the first target, for callers that have not let the store choose."""
        return await self._first.infer(request)

    def stream(self, request: InferRequest) -> ResponseStream:
        return self._first.stream(request)

    async def stop(self) -> None:
        """Nothing: the repository stops its models."""
