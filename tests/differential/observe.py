"""Answers as plain data: dicts and lists of scalars, which two servers' answers are compared as."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import grpc
import httpx
from google.protobuf import json_format
from google.protobuf.message import Message
from tritonclient.grpc import service_pb2, service_pb2_grpc

from differential.peers import Peer

HEADER_LENGTH = "inference-header-content-length"


@dataclass(frozen=True)
class Case:
    """The same requests to any server, and what came back as plain data."""

    name: str
    run: Callable[[Peer], Any]


@dataclass(frozen=True)
class Http:
    """One HTTP request; `exact` compares the body's text, otherwise what it means."""

    name: str
    method: str
    path: str
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    exact: bool = True

    def case(self) -> Case:
        return Case(f"http: {self.name}", self.run)

    def run(self, peer: Peer) -> dict[str, Any]:
        content = self.body if isinstance(self.body, bytes | None) else json.dumps(self.body).encode()
        answer = client(peer).request(self.method, self.path, content=content, headers=dict(self.headers))
        return shown(answer, self.exact)


@cache
def client(peer: Peer) -> httpx.Client:
    """One for each server, as to make one takes longer than most requests."""
    return httpx.Client(base_url=peer.url, timeout=30, headers={"accept-encoding": "identity"})


def shown(answer: httpx.Response, exact: bool = True) -> dict[str, Any]:
    """The status, the headers that mean something, and the body."""
    seen: dict[str, Any] = {"status": answer.status_code}
    if answer.status_code == 200:
        seen["type"] = answer.headers.get("content-type")
        seen["encoding"] = answer.headers.get("content-encoding")
    content = answer.content
    if HEADER_LENGTH in answer.headers:
        length = int(answer.headers[HEADER_LENGTH])
        seen["binary"] = content[length:].hex()
        content = content[:length]
    text = content.decode("utf-8", "backslashreplace")
    try:
        seen["body"] = text if exact and answer.status_code == 200 else json.loads(text)
    except ValueError:
        seen["body"] = text
    return seen


def call(
    peer: Peer, method: str, request: Message, metadata: tuple[tuple[str, str], ...] = (), seconds: float = 30
) -> Any:
    """One unary RPC: the answer as JSON would write it, or the status."""
    with grpc.insecure_channel(peer.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            return message(getattr(stub, method)(request, timeout=seconds, metadata=metadata))
        except grpc.RpcError as error:
            return status(error)


def stream(peer: Peer, requests: list[Any], metadata: tuple[tuple[str, str], ...] = ()) -> list[Any]:
    """The responses of one ModelStreamInfer, and how it ended."""
    seen: list[Any] = []
    with grpc.insecure_channel(peer.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            responses = stub.ModelStreamInfer(iter(requests), timeout=30, metadata=metadata)
            seen.extend(map(message, responses))  # those before an error stay
        except grpc.RpcError as error:
            seen.append(status(error))
    return seen


def message(value: Message) -> Any:
    return json_format.MessageToDict(value, preserving_proto_field_name=True)


def status(error: grpc.RpcError) -> dict[str, str]:
    return {"code": error.code().name, "details": error.details()}


def infer_request(model: str, *inputs: tuple[str, str, list[int], bytes], **fields: Any) -> Any:
    """A ModelInferRequest with raw contents."""
    tensors = [
        service_pb2.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)
        for name, datatype, shape, _ in inputs
    ]
    raw = [content for *_, content in inputs]
    return service_pb2.ModelInferRequest(model_name=model, inputs=tensors, raw_input_contents=raw, **fields)


def parameter(value: bool | int | float | str) -> Any:
    """An InferParameter of the value's own type."""
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    return service_pb2.InferParameter(**{kinds[type(value)]: value})
