"""Exchanges of the KServe v2 protocol: HTTP, gRPC, streams, ensembles, decoupled models, the model repository."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from differential.observe import infer_request, message, parameter, status, stream
from exchanges.exchange import Exchange, get, request, steady
from support.server import Server, wait_until

FOUR = struct.pack("<4f", 1, 2, 3, 4)
PAIR = [{"name": name, "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]} for name in ("INPUT0", "INPUT1")]
SIZED = [{"name": name, "datatype": "FP32", "shape": [4], "parameters": {"binary_data_size": 16}}
         for name in ("INPUT0", "INPUT1")]  # fmt: skip
RAW_PAIR = [(name, "FP32", [4], FOUR) for name in ("INPUT0", "INPUT1")]
EMPTY_FINAL = {"triton_enable_empty_final_response": parameter(True)}


def infer(name: str, body: Any, model: str = "add_sub", **headers: str) -> Exchange:
    return request(f"infer: {name}", f"/v2/models/{model}/infer", body, **headers)


def binary(name: str, header: dict[str, Any], content: bytes) -> Exchange:
    text = json.dumps(header).encode()
    return infer(name, text + content, inference_header_content_length=str(len(text)))


def generate(name: str, body: Any, model: str = "demo_model", kind: str = "generate") -> Exchange:
    return request(f"{kind}: {name}", f"/v2/models/{model}/{kind}", body)


def string(value: str) -> bytes:
    return len(value.encode()).to_bytes(4, "little") + value.encode()


HTTP = [
    get("server metadata", "/v2"),
    get("live", "/v2/health/live"),
    get("ready", "/v2/health/ready"),
    get("model ready", "/v2/models/add_sub/ready"),
    get("model metadata", "/v2/models/add_sub"),
    get("model metadata of a language model", "/v2/models/demo_model"),
    get("model config", "/v2/models/add_sub/config"),
    get("model config of a language model", "/v2/models/demo_model/config"),
    get("an unknown model", "/v2/models/nowhere"),
    get("an unknown version", "/v2/models/add_sub/versions/9"),
    request("repository index", "/v2/repository/index", {}),
    request("load of an unknown model", "/v2/repository/models/nowhere/load", {}),
    request("a bad load parameter", "/v2/repository/models/add_sub/load", {"parameters": {"config": 3}}),
    get("log settings", "/v2/logging"),
    get("trace settings", "/v2/trace/setting"),
    get("shared memory", "/v2/systemsharedmemory/status"),
    infer("plain", {"id": "1", "inputs": PAIR}),
    infer("one output", {"inputs": PAIR, "outputs": [{"name": "OUTPUT1"}]}),
    infer("binary outputs", {"inputs": PAIR, "parameters": {"binary_data_output": True}}),
    binary("binary inputs", {"inputs": SIZED}, FOUR * 2),
    binary("binary inputs, too short", {"inputs": SIZED}, FOUR),
    infer("an ensemble", {"inputs": [{**PAIR[0], "name": name} for name in "AB"]}, "ensemble"),
    infer("strings", {"inputs": [{"name": "INPUT0", "datatype": "BYTES", "shape": [2], "data": ["é", ""]}]}, "strings"),
    infer("classification", {"inputs": [{**PAIR[0], "shape": [1, 5], "data": [1, 5, 3, 2, 4]}],
                             "outputs": [{"name": "OUTPUT0", "parameters": {"classification": 2}}]}, "classes"),
    infer("a missing input", {"inputs": PAIR[:1]}),
    infer("an unknown input", {"inputs": [*PAIR, {**PAIR[0], "name": "X"}]}),
    infer("a wrong shape", {"inputs": [PAIR[0], {**PAIR[1], "shape": [3]}]}),
    infer("a wrong datatype", {"inputs": [PAIR[0], {**PAIR[1], "datatype": "INT32"}]}),
    infer("an unknown output", {"inputs": PAIR, "outputs": [{"name": "X"}]}),
    infer("no inputs", {}),
    infer("no JSON", b"{nonsense"),
    infer("an unknown model", {"inputs": PAIR}, "nowhere"),
    infer("a decoupled model", {"inputs": [{"name": "N", "datatype": "INT32", "shape": [1], "data": [2]}]}, "repeat"),
    *(
        infer(f"an error of the model: {code}",
              {"inputs": [{"name": "CODE", "datatype": "BYTES", "shape": [1, 1], "data": [code]}]}, "errors")
        for code in ("NOT_FOUND", "UNAVAILABLE", "INVALID_ARG", "raise", "plain", "wrong type", "no outputs")
    ),
    infer("a language model", {"inputs": [{**PAIR[0], "name": "text_input", "datatype": "BYTES", "shape": [1],
                                           "data": ["A list"]}],
                               "parameters": {"max_tokens": 4, "temperature": 0}}, "demo_model"),
    generate("text", {"text_input": "A list is", "max_tokens": 8, "temperature": 0}),
    generate("a model of tensors", {"INPUT0": [1, 2, 3, 4], "INPUT1": [1, 2, 3, 4]}, "add_sub"),
    generate("no input", {"max_tokens": 8}),
    generate("an unknown model", {"text_input": "A list is"}, "nowhere"),
    generate("text", {"text_input": "A list is", "max_tokens": 8, "temperature": 0}, kind="generate_stream"),
    generate("three responses", {"N": 3}, "repeat", "generate_stream"),
    generate("an error in the middle", {"N": 3, "FAIL_AT": 1}, "repeat", "generate_stream"),
    generate("an ensemble", {"N": 2}, "ensemble_stream", "generate_stream"),
]  # fmt: skip


def repeat(n: int, fail_at: int = -1, **fields: Any) -> Any:
    numbers = (("N", n), ("FAIL_AT", fail_at))
    return infer_request("repeat", *((name, "INT32", [1], struct.pack("<i", v)) for name, v in numbers), **fields)


def text(value: str, *, stream: bool = False, **parameters: int | float) -> Any:
    inputs = [("text_input", "BYTES", [1], string(value)), ("stream", "BOOL", [1], bytes([stream]))]
    set_ones = {name: parameter(value) for name, value in parameters.items()}
    return infer_request("demo_model", *inputs, parameters=set_ones)


def rpc(name: str, method: str, sent: Any) -> Exchange:
    return Exchange(f"gRPC {method}: {name}", lambda server: in_order(called(server, method, sent)))


def called(server: Server, method: str, sent: Any) -> Any:
    """The answer or the status, and the metadata around it."""
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            answer, exchange = getattr(stub, method).with_call(sent, timeout=30)
        except grpc.RpcError as error:
            return status(error)
        trailers = {name: value for name, value in exchange.trailing_metadata() or () if name != "x-request-id"}
        return {"answer": message(answer), "trailers": trailers}


def streamed(name: str, *sent: Any) -> Exchange:
    return Exchange(f"gRPC ModelStreamInfer: {name}", lambda server: whole_text(in_order(stream(server, list(sent)))))


def in_order(answer: Any) -> Any:
    """As HTTP's answers are; maps of protobuf have no order of their own."""
    return json.loads(json.dumps(steady(answer), sort_keys=True))


def whole_text(responses: list[Any]) -> list[Any]:
    """A language model's last response with the text of all: how many tokens share a response depends on speed."""
    text = ""
    for response in responses:
        answer = response.get("infer_response", {})
        if answer.get("model_name") != "demo_model":
            return responses
        text += "".join(base64.b64decode(raw)[4:].decode() for raw in answer.pop("raw_output_contents", ()))
    return [*responses[-1:], text]


def leave_a_stream(server: Server) -> Any:
    """A client that cancels its stream after the first response: the engine is idle again."""
    with grpc.insecure_channel(server.grpc) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(
            iter([text("A list is", stream=True, max_tokens=1500, ignore_eos=True)]), timeout=30
        )
        first = next(call)
        call.cancel()
    wait_until(server.is_idle)
    return {"error": first.error_message, "outputs": [output.name for output in first.infer_response.outputs]}


CODE = ("CODE", "BYTES", [1, 1], string("NOT_FOUND"))
GRPC = [
    rpc("server", "ServerMetadata", service_pb2.ServerMetadataRequest()),
    rpc("add_sub", "ModelMetadata", service_pb2.ModelMetadataRequest(name="add_sub")),
    rpc("demo_model", "ModelMetadata", service_pb2.ModelMetadataRequest(name="demo_model")),
    rpc("demo_model", "ModelConfig", service_pb2.ModelConfigRequest(name="demo_model")),
    rpc("add_sub", "ModelReady", service_pb2.ModelReadyRequest(name="add_sub")),
    rpc("all", "RepositoryIndex", service_pb2.RepositoryIndexRequest()),
    rpc("plain", "ModelInfer", infer_request("add_sub", *RAW_PAIR, id="1")),
    rpc("an ensemble", "ModelInfer", infer_request("ensemble", *((n, "FP32", [4], FOUR) for n in "AB"))),
    rpc("a language model", "ModelInfer", text("A list is", max_tokens=8, temperature=0)),
    rpc("a missing input", "ModelInfer", infer_request("add_sub", RAW_PAIR[0])),
    rpc("an unknown model", "ModelInfer", infer_request("nowhere", *RAW_PAIR)),
    rpc("an error of the model", "ModelInfer", infer_request("errors", CODE)),
    rpc("a decoupled model", "ModelInfer", repeat(2)),
    streamed("nothing"),
    streamed("a model of tensors, twice", infer_request("add_sub", *RAW_PAIR, id="1")),
    streamed("a language model", text("A list is", stream=True, max_tokens=8, temperature=0)),
    streamed("a language model in one piece", text("A list is", max_tokens=8, temperature=0)),
    streamed("three responses", repeat(3, id="9")),
    streamed("three responses, empty final", repeat(3, id="9", parameters=EMPTY_FINAL)),
    streamed("an error in the middle", repeat(3, 1, id="9", parameters=EMPTY_FINAL)),
    streamed("an unknown model, then a known one", infer_request("nowhere", *RAW_PAIR), repeat(1, id="2")),
    Exchange("gRPC ModelStreamInfer: a client that leaves", leave_a_stream),
]

EXCHANGES = [*HTTP, *GRPC]
