"""The methods of the gRPC port by path, with reflection, by which tools such as grpcurl learn of the services."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2
from tritonclient.grpc import service_pb2 as pb

from penstock.engines.errors import PayloadTooLargeError
from penstock.gateway.apis.kserve.context import KServe
from penstock.gateway.apis.kserve.grpc.administration import Administration, Describe
from penstock.gateway.apis.kserve.grpc.health import CHECK, WATCH, HealthService
from penstock.gateway.apis.kserve.grpc.infer import InferRpcs
from penstock.gateway.apis.kserve.grpc.rpc import Message, Method, Rpc, RpcGuard, UnaryHandler
from penstock.gateway.apis.kserve.grpc.settings import GrpcSettings
from penstock.gateway.requests.access import (
    CHANGE_MODELS,
    INFER,
    OWN_MEMORY,
    PROBE,
    SEE_CONFIG,
    SEE_LOGGING,
    SEE_MEMORY,
    SEE_METADATA,
    SEE_READINESS,
    SEE_REPOSITORY,
    SEE_STATISTICS,
    SEE_TRACE,
    Access,
)
from penstock.gateway.requests.context import RequestContext

_SERVICE = "/inference.GRPCInferenceService/"
INFER_PATH = _SERVICE + "ModelInfer"
STREAM_PATH = _SERVICE + "ModelStreamInfer"
_MAX_PLAIN_BYTES = 1 << 20
"""Of requests without tensors or files, as over HTTP."""
_WITH_FILES = frozenset({"RepositoryModelLoad"})

Plain = Callable[[Message, RequestContext], Awaitable[Message]]


class Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Looks methods up; what is not here is UNIMPLEMENTED. The library asks when an RPC's headers are there, so who may
    not come in is refused before anything of a message is received."""

    def __init__(self, methods: dict[str, Method], guard: RpcGuard) -> None:
        self.methods = methods
        self._guard = guard

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        path = handler_call_details.method
        return self._guard.handler(path, self.methods.get(path), handler_call_details.invocation_metadata)


def build_service(kserve: KServe, guard: RpcGuard, health: HealthService, settings: GrpcSettings) -> Service:
    """Health, ServerLive and ServerReady need no key and answer while draining; all others are guarded."""
    describe, infer = Describe(kserve, lambda: health.serving), InferRpcs(kserve, guard, settings)
    methods = {
        CHECK: guard.open(health_pb2.HealthCheckRequest, health.check),
        WATCH: Method(PROBE, lambda _: health.watch_handler()),
        _SERVICE + "ServerLive": guard.open(pb.ServerLiveRequest, describe.server_live),
        _SERVICE + "ServerReady": guard.open(pb.ServerReadyRequest, describe.server_ready),
        INFER_PATH: guard.unary(INFER, infer.infer),
    }
    for name, (access, handler) in _plain(describe, Administration(kserve)).items():
        methods[_SERVICE + name] = guard.unary(access, _of_message(name, handler))

    methods[STREAM_PATH] = guard.stream(INFER, infer.stream)
    methods |= dict.fromkeys(PATHS, reflection_method(guard))
    return Service(methods, guard)


def _plain(describe: Describe, administration: Administration) -> dict[str, tuple[Access, Plain]]:
    """The handlers that need nothing but the message and who sends it, by the name of their method. Those that read
    settings also change them, for which they ask for the role themselves."""
    return {
        "ModelReady": (SEE_READINESS, describe.model_ready),
        "ServerMetadata": (SEE_METADATA, describe.server_metadata),
        "ModelMetadata": (SEE_METADATA, describe.model_metadata),
        "ModelConfig": (SEE_CONFIG, describe.model_config),
        "ModelStatistics": (SEE_STATISTICS, describe.model_statistics),
        "TraceSetting": (SEE_TRACE, describe.trace_setting),
        "LogSettings": (SEE_LOGGING, describe.log_settings),
        "RepositoryIndex": (SEE_REPOSITORY, administration.index),
        "RepositoryModelLoad": (CHANGE_MODELS, administration.load),
        "RepositoryModelUnload": (CHANGE_MODELS, administration.unload),
        "SystemSharedMemoryStatus": (SEE_MEMORY, administration.system_status),
        "SystemSharedMemoryRegister": (OWN_MEMORY, administration.system_register),
        "SystemSharedMemoryUnregister": (OWN_MEMORY, administration.system_unregister),
        "CudaSharedMemoryStatus": (SEE_MEMORY, administration.cuda_status),
        "CudaSharedMemoryRegister": (OWN_MEMORY, administration.cuda_register),
        "CudaSharedMemoryUnregister": (OWN_MEMORY, administration.cuda_unregister),
    }


def _of_message(name: str, handler: Plain) -> UnaryHandler:
    parse: Callable[[bytes], Message] = getattr(pb, name + "Request").FromString
    limit = None if name in _WITH_FILES else _MAX_PLAIN_BYTES

    async def call(data: bytes, rpc: Rpc, context: RequestContext) -> bytes:
        if limit is not None and len(data) > limit:
            raise PayloadTooLargeError(f"the request message is larger than {limit} bytes")
        return bytes((await handler(parse(data), context)).SerializeToString())

    return call


SERVICES = ("inference.GRPCInferenceService", "grpc.health.v1.Health", reflection.SERVICE_NAME)
PATHS = tuple(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in ("v1alpha", "v1"))
"""The messages of both versions are the same."""


def reflection_method(guard: RpcGuard) -> Method:
    servicer = reflection.aio.ReflectionServicer(SERVICES)
    parse = reflection_pb2.ServerReflectionRequest.FromString

    async def call(rpc: Rpc, context: RequestContext) -> None:
        async for response in servicer.ServerReflectionInfo(_requests(rpc), rpc):
            await rpc.write(response.SerializeToString())

    async def _requests(rpc: Rpc) -> AsyncIterator[object]:
        while (data := await rpc.read()) is not grpc.aio.EOF:
            yield parse(data)

    return guard.stream(SEE_METADATA, call)
