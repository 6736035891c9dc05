"""Server reflection: tools such as grpcurl ask what the services look like."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from penstock.gateway.front.access import SEE_METADATA
from penstock.gateway.front.context import RequestContext
from penstock.gateway.kserve.grpc.rpc import Guard, Method, Rpc

SERVICES = ("inference.GRPCInferenceService", "grpc.health.v1.Health", reflection.SERVICE_NAME)
PATHS = tuple(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in ("v1alpha", "v1"))
"""The messages of both versions are the same."""


def reflection_method(guard: Guard) -> Method:
    servicer = reflection.aio.ReflectionServicer(SERVICES)
    parse = reflection_pb2.ServerReflectionRequest.FromString

    async def call(rpc: Rpc, context: RequestContext) -> None:
        async for response in servicer.ServerReflectionInfo(_requests(rpc), rpc):
            await rpc.write(response.SerializeToString())

    async def _requests(rpc: Rpc) -> AsyncIterator[object]:
        while (data := await rpc.read()) is not grpc.aio.EOF:
            yield parse(data)

    return guard.stream(SEE_METADATA, call)
