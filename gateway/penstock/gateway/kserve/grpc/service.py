"""All methods of the gRPC port by path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2 as pb

from penstock.engines.errors import PayloadTooLargeError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.kserve.context import KServe
from penstock.gateway.kserve.grpc.administration import Administration
from penstock.gateway.kserve.grpc.describe import Describe
from penstock.gateway.kserve.grpc.health import CHECK, WATCH, Health
from penstock.gateway.kserve.grpc.infer import Inference
from penstock.gateway.kserve.grpc.reflection import PATHS, reflection_handler
from penstock.gateway.kserve.grpc.rpc import Guard, Message, Rpc, UnaryHandler
from penstock.gateway.kserve.grpc.settings import GrpcSettings
from penstock.gateway.kserve.grpc.stream import InferStream

_SERVICE = "/inference.GRPCInferenceService/"
_MAX_PLAIN_BYTES = 1 << 20
"""Of requests without tensors or files, as over HTTP."""
_WITH_FILES = frozenset({"RepositoryModelLoad"})

Plain = Callable[[Message], Awaitable[Message]]


class Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Looks methods up; what is not here is UNIMPLEMENTED."""

    def __init__(self, methods: dict[str, grpc.RpcMethodHandler]) -> None:
        self.methods = methods

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self.methods.get(handler_call_details.method)


def build_service(kserve: KServe, guard: Guard, health: Health, settings: GrpcSettings) -> Service:
    """Health, ServerLive and ServerReady need no key and answer while draining; all others are guarded."""
    describe, inference = Describe(kserve, lambda: health.serving), Inference(kserve, settings.header_forward_pattern)
    methods = {
        CHECK: guard.open(health_pb2.HealthCheckRequest, health.check),
        WATCH: health.watch_handler(),
        _SERVICE + "ServerLive": guard.open(pb.ServerLiveRequest, describe.server_live),
        _SERVICE + "ServerReady": guard.open(pb.ServerReadyRequest, describe.server_ready),
        _SERVICE + "ModelInfer": guard.unary(_SERVICE + "ModelInfer", inference.infer),
    }
    for name, handler in _plain(describe, Administration(kserve)).items():
        methods[_SERVICE + name] = guard.unary(_SERVICE + name, _of_message(name, handler))

    async def stream(rpc: Rpc, context: RequestContext) -> None:
        await InferStream(inference, guard, rpc, context, settings.max_requests_per_stream).run()

    methods[_SERVICE + "ModelStreamInfer"] = guard.stream(_SERVICE + "ModelStreamInfer", stream)
    methods |= {path: reflection_handler(guard, path) for path in PATHS}
    return Service(methods)


def _plain(describe: Describe, administration: Administration) -> dict[str, Plain]:
    """The handlers that need nothing but the message, by the name of their method."""
    return {
        "ModelReady": describe.model_ready,
        "ServerMetadata": describe.server_metadata,
        "ModelMetadata": describe.model_metadata,
        "ModelConfig": describe.model_config,
        "ModelStatistics": describe.model_statistics,
        "TraceSetting": describe.trace_setting,
        "LogSettings": describe.log_settings,
        "RepositoryIndex": administration.index,
        "RepositoryModelLoad": administration.load,
        "RepositoryModelUnload": administration.unload,
        "SystemSharedMemoryStatus": administration.system_status,
        "SystemSharedMemoryRegister": administration.system_register,
        "SystemSharedMemoryUnregister": administration.system_unregister,
        "CudaSharedMemoryStatus": administration.cuda_status,
        "CudaSharedMemoryRegister": administration.cuda_register,
        "CudaSharedMemoryUnregister": administration.cuda_unregister,
    }


def _of_message(name: str, handler: Plain) -> UnaryHandler:
    parse: Callable[[bytes], Message] = getattr(pb, name + "Request").FromString
    limit = None if name in _WITH_FILES else _MAX_PLAIN_BYTES

    async def call(data: bytes, rpc: Rpc, context: RequestContext) -> bytes:
        if limit is not None and len(data) > limit:
            raise PayloadTooLargeError(f"the request message is larger than {limit} bytes")
        return bytes((await handler(parse(data))).SerializeToString())

    return call
