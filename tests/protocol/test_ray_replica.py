"""The server in a Ray actor, as Ray Serve calls it; without Ray."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send
from tritonclient.grpc import service_pb2 as pb

from penstock.gateway.ray_serve import grpc_calls
from penstock.gateway.ray_serve.deployment_file import read_deployment
from penstock.gateway.ray_serve.replica_server import ReplicaServer
from penstock.gateway.ray_serve.stream_guard import BODY
from protocol.asgi_client import AsgiCall


@pytest.fixture
async def replica() -> AsyncIterator[ReplicaServer]:
    settings = {"engine": "simulated", "served_model_name": "m", "api_key": "user", "admin_key": "admin"}
    server = ReplicaServer(read_deployment(settings, environ={}).replica_config(), "r1")
    await server.start()
    yield server
    await server.stop()


class Context:
    """Serve's of an RPC."""

    def __init__(self, key: str = "user") -> None:
        self._metadata = [("authorization", f"Bearer {key}")]
        self._trailing: list[tuple[str, str]] = [("request_id", "serve")]
        self.status: tuple[grpc.StatusCode, str] | None = None
        self._code = grpc.StatusCode.OK

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._metadata

    def trailing_metadata(self) -> list[tuple[str, str]]:
        return self._trailing

    def set_trailing_metadata(self, metadata: list[tuple[str, str]]) -> None:
        self._trailing = metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self.status = (self._code, details)


async def ask(replica: ASGIApp, path: str, key: str = "user", **request: Any) -> AsgiCall:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    return await AsgiCall(replica, path, headers=headers, **request).run()


def with_scope(replica: ReplicaServer, body: bytes) -> ASGIApp:
    """The replica behind a proxy that sends the body with the scope."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await replica({**scope, BODY: body}, receive, send)

    return app


async def test_over_http(replica: ReplicaServer) -> None:
    body = {"model": "m", "max_tokens": 4, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
    call = await ask(replica, "/v1/chat/completions", body=body)
    assert dict(call.messages[0]["headers"])[b"x-penstock-replica"] == b"r1"
    assert call.messages[-1]["body"].endswith(b"data: [DONE]\n\n")
    assert (await ask(replica, "/v1/models", key="other", method="GET")).messages[0]["status"] == 401
    for path in ("/v2/repository/models/m/unload", "/sleep"):
        refused = await ask(replica, path, key="admin", body={})
        assert refused.messages[0]["status"] in (400, 501)
        assert b"only the replica" in json.dumps(json.loads(refused.messages[1]["body"])).encode()
    carried = await ask(with_scope(replica, json.dumps(body).encode()), "/v1/chat/completions", body=b"late")
    assert carried.bodies[-1].endswith(b"data: [DONE]\n\n")
    lifespan: list[Any] = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

    async def receive() -> Any:
        return lifespan.pop(0)

    async def send(message: Any) -> None:
        said.append(message["type"])

    said: list[str] = []
    await replica({"type": "lifespan"}, receive, send)
    assert said == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    replica.check()
    assert replica.load().figures() == {"waiting": 0.0, "running": 0.0, "kv_usage": 0.0}
    below = AsgiCall(replica, "/llm/v1/models", method="GET", headers={"authorization": "Bearer user"})
    below._scope["root_path"] = "/llm"
    assert (await below.run()).messages[0]["status"] == 200


async def test_over_grpc(replica: ReplicaServer) -> None:
    service = replica.grpc_service()
    live = await grpc_calls.call(service, "ServerLive", b"", Context())
    assert pb.ServerLiveResponse.FromString(live.SerializeToString()).live
    request = pb.ModelInferRequest(model_name="m", id="7")
    request.parameters["max_tokens"].int64_param = 3
    text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(b"Hi")

    async def requests() -> AsyncIterator[bytes]:
        yield request.SerializeToString()
        yield pb.ModelInferRequest(model_name="no such model").SerializeToString()

    context = Context()
    answers = [
        pb.ModelStreamInferResponse.FromString(answer.SerializeToString())
        async for answer in grpc_calls.stream(service, "ModelStreamInfer", requests(), context)
    ]
    assert context.status is None
    assert any(answer.infer_response.id == "7" for answer in answers)
    assert sum("no such model" in answer.error_message for answer in answers) == 1
    assert ("request_id", "serve") in context.trailing_metadata()
    for name, message, key, code in REFUSED:
        context = Context(key)
        with pytest.raises(grpc_calls.RpcAborted):
            await grpc_calls.call(service, name, message.SerializeToString(), context)
        assert context.status is not None
        assert context.status[0] is code


REFUSED = [
    ("ModelMetadata", pb.ModelMetadataRequest(name="no such model"), "user", grpc.StatusCode.NOT_FOUND),
    ("ModelMetadata", pb.ModelMetadataRequest(name="m"), "other", grpc.StatusCode.UNAUTHENTICATED),
    ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(), "admin", grpc.StatusCode.UNIMPLEMENTED),
]
