"""The RPCs that tell what there is: server, models, statistics."""

from __future__ import annotations

from collections.abc import Callable

from tritonclient.grpc import service_pb2 as pb

from penstock.classic.base import InferModel, reports_ready
from penstock.engines.errors import ModelNotFoundError, NotReadyError
from penstock.gateway.front.context import RequestContext, Role
from penstock.gateway.kserve.context import KServe
from penstock.gateway.kserve.grpc.rpc import Message
from penstock.gateway.kserve.metadata import model_metadata, server_metadata, would_load
from penstock.gateway.kserve.settings_http import check_traced_model
from penstock.gateway.kserve.statistics import statistics


class Describe:
    def __init__(self, kserve: KServe, ready: Callable[[], bool]) -> None:
        self._kserve = kserve
        self._models = kserve.models
        self._ready = ready
        self._live = kserve.health.live

    def server_live(self, request: Message) -> Message:
        return pb.ServerLiveResponse(live=self._live())

    def server_ready(self, request: Message) -> Message:
        return pb.ServerReadyResponse(ready=self._ready())

    async def model_ready(self, request: Message, context: RequestContext) -> Message:
        """False for models that are not there. Raises InvalidRequestError for a version that is no number."""
        try:
            return pb.ModelReadyResponse(ready=reports_ready(self._models.model(request.name, request.version)))
        except (ModelNotFoundError, NotReadyError):
            return pb.ModelReadyResponse(ready=would_load(self._kserve, request.name))

    async def server_metadata(self, request: Message, context: RequestContext) -> Message:
        return pb.ServerMetadataResponse(**server_metadata(self._kserve))

    async def model_metadata(self, request: Message, context: RequestContext) -> Message:
        model = await self._described(request, context)
        versions = [model.version] if request.version else self._models.versions(request.name)
        return pb.ModelMetadataResponse(**model_metadata(model, versions))

    async def model_config(self, request: Message, context: RequestContext) -> Message:
        return pb.ModelConfigResponse(config=(await self._described(request, context)).config)

    async def _described(self, request: Message, context: RequestContext) -> InferModel:
        context.principal.require_model(request.name)
        if self._kserve.on_demand is not None:
            await self._kserve.on_demand.describe(request.name, context)
        return self._models.model(request.name, request.version)

    async def model_statistics(self, request: Message, context: RequestContext) -> Message:
        found = statistics(self._models, context.principal, request.name, request.version)
        return pb.ModelStatisticsResponse(**found)

    async def trace_setting(self, request: Message, context: RequestContext) -> Message:
        """Reads, and changes what is named. Raises InvalidRequestError, UnsupportedError, PermissionDeniedError."""
        tracing, model = self._kserve.tracing, request.model_name
        check_traced_model(self._models, context.principal, model)
        if request.settings:
            context.principal.require(Role.ADMIN)
            tracing.update({name: list(item.value) for name, item in request.settings.items()}, model)
            await self._kserve.spread()
        answer = pb.TraceSettingResponse()
        for name, value in tracing.settings(model).items():
            answer.settings[name].value.extend([value] if isinstance(value, str) else value)
        return answer

    async def log_settings(self, request: Message, context: RequestContext) -> Message:
        """Reads, and changes what is named. Raises InvalidRequestError, UnsupportedError, PermissionDeniedError."""
        logs = self._kserve.logs
        changes = {}
        for name, item in request.settings.items():
            kind = item.WhichOneof("parameter_choice")
            changes[name] = getattr(item, kind) if kind is not None else None
        if changes:
            context.principal.require(Role.ADMIN)
            logs.update(changes)
        answer = pb.LogSettingsResponse()
        for name, value in logs.settings().items():
            setting = answer.settings[name]
            if isinstance(value, bool):
                setting.bool_param = value
            elif isinstance(value, int):
                setting.uint32_param = value
            else:
                setting.string_param = value
        return answer
