"""KServe's gRPC service, as Ray Serve's proxies learn of it.

Serve pickles requests on their way to replicas, and the messages of tritonclient's stubs cannot be pickled: they name a
module that is not there. So messages stay bytes in proxies, which also saves decoding them twice.
"""

from __future__ import annotations

from typing import Any

import grpc
from tritonclient.grpc import service_pb2

ADDS_SERVICE = "penstock.gateway.ray_serve.grpc_service:add_service"
"""For `grpc_servicer_functions` of a Serve configuration."""
SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]


def add_service(servicer: Any, server: Any) -> None:
    """As generated stubs do it. Serve puts its own functions in the place of `servicer`'s."""
    handlers = {method.name: _handler(method)(getattr(servicer, method.name)) for method in SERVICE.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))


def _handler(method: Any) -> Any:
    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler
    return grpc.unary_unary_rpc_method_handler
