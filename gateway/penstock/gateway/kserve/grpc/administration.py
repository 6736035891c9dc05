"""The RPCs that change the server: model repository and shared memory."""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2 as pb

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.kserve.context import KServe
from penstock.gateway.kserve.grpc.rpc import Message

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
