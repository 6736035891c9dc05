"""The RPCs that describe the server and its models, and those that change them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from penstock.classic.base import reports_ready
from penstock.engines.errors import InvalidRequestError, ModelNotFoundError, NotReadyError, UnsupportedError
from penstock.gateway.apis.kserve.context import KServe
from penstock.gateway.apis.kserve.grpc.rpc import Message
from penstock.gateway.apis.kserve.http_administration import check_traced_model
from penstock.gateway.apis.kserve.http_models import model_metadata, server_metadata, statistics
from penstock.gateway.requests.context import RequestContext, Role


class Describe:
    """The RPCs that say what there is; those of settings also change them."""

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
            return pb.ModelReadyResponse(ready=self._kserve.plane.would_load(request.name))

    async def server_metadata(self, request: Message, context: RequestContext) -> Message:
        return pb.ServerMetadataResponse(**server_metadata(self._kserve))

    async def model_metadata(self, request: Message, context: RequestContext) -> Message:
        model = await self._kserve.plane.describe(request.name, request.version, context)
        versions = [model.version] if request.version else self._models.versions(request.name)
        return pb.ModelMetadataResponse(**model_metadata(model, versions))

    async def model_config(self, request: Message, context: RequestContext) -> Message:
        model = await self._kserve.plane.describe(request.name, request.version, context)
        return pb.ModelConfigResponse(config=model.config)

    async def model_statistics(self, request: Message, context: RequestContext) -> Message:
        counters = statistics(self._models, context.principal, request.name, request.version)
        return pb.ModelStatisticsResponse(**counters)

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


_FILE = "file:"


class Administration:
    def __init__(self, kserve: KServe) -> None:
        self._models = kserve.models
        self._regions = kserve.shared_memory
        self._spread = kserve.spread

    async def index(self, request: Message, context: RequestContext) -> Message:
        _no_repository(request)
        answer = pb.RepositoryIndexResponse()
        for entry in self._models.index(ready=request.ready):
            if context.principal.may_use(entry.name):
                reason = entry.reason_for(context.principal)
                answer.models.add(name=entry.name, version=entry.version, state=entry.state or "", reason=reason)
        return answer

    async def load(self, request: Message, context: RequestContext) -> Message:
        """Returns when the model is ready. Raises PenstockError."""
        _no_repository(request)
        config: str | None = None
        files: dict[str, bytes] = {}
        for name, parameter in request.parameters.items():
            if name == "config":
                config = _value(name, parameter, "string_param")
            elif name.startswith(_FILE):
                files[name.removeprefix(_FILE)] = _value(name, parameter, "bytes_param")
            else:
                raise InvalidRequestError(f"unrecognized load parameter '{name[:64]}'.", param=name)
        await self._models.load(request.model_name, config=config, files=files or None)
        return pb.RepositoryModelLoadResponse()

    async def unload(self, request: Message, context: RequestContext) -> Message:
        _no_repository(request)
        dependents = False
        for name, parameter in request.parameters.items():
            if name != "unload_dependents":
                raise InvalidRequestError(f"unrecognized unload parameter '{name[:64]}'.", param=name)
            dependents = _value(name, parameter, "bool_param", "unload")
        await self._models.unload(request.model_name, unload_dependents=dependents)
        return pb.RepositoryModelUnloadResponse()

    async def system_status(self, request: Message, context: RequestContext) -> Message:
        answer = pb.SystemSharedMemoryStatusResponse()
        for region in self._regions.of(context.principal).status(request.name):
            shown = answer.regions[region.name]
            shown.name, shown.key = region.name, region.key
            shown.offset, shown.byte_size = region.offset, region.byte_size
        return answer

    async def system_register(self, request: Message, context: RequestContext) -> Message:
        self._regions.of(context.principal).register(request.name, request.key, request.offset, request.byte_size)
        await self._spread()
        return pb.SystemSharedMemoryRegisterResponse()

    async def system_unregister(self, request: Message, context: RequestContext) -> Message:
        self._regions.of(context.principal).unregister(request.name)
        await self._spread()
        return pb.SystemSharedMemoryUnregisterResponse()

    async def cuda_status(self, request: Message, context: RequestContext) -> Message:
        self._regions.cuda_status(request.name)
        return pb.CudaSharedMemoryStatusResponse()

    async def cuda_register(self, request: Message, context: RequestContext) -> Message:
        self._regions.register_cuda(request.name)
        return pb.CudaSharedMemoryRegisterResponse()

    async def cuda_unregister(self, request: Message, context: RequestContext) -> Message:
        self._regions.unregister_cuda(request.name)
        return pb.CudaSharedMemoryUnregisterResponse()


def _no_repository(request: Message) -> None:
    if request.repository_name:
        raise UnsupportedError("'repository_name' specification is not supported")


def _value(name: str, parameter: Message, kind: str, verb: str = "load") -> Any:
    if parameter.WhichOneof("parameter_choice") != kind:
        raise InvalidRequestError(f"invalid value type for {verb} parameter '{name[:64]}', expected {kind}.")
    return getattr(parameter, kind)
