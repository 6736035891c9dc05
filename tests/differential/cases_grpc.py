"""Unary RPCs: description, inference in raw and typed contents, errors and their codes."""

from __future__ import annotations

import struct
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb

from differential.cases_http import CODES, WAYS
from differential.observe import Case, call, infer_request, message, parameter, status
from differential.peers import Peer

MODELS = ("add_sub", "batched", "repeat", "reshaped", "some_versions", "queue_reject")
FOUR = struct.pack("<4f", 1, 2, 3, 4)
PAIR = (("INPUT0", "FP32", [4], FOUR), ("INPUT1", "FP32", [4], FOUR))
Tensor = pb.ModelInferRequest.InferInputTensor
Output = pb.ModelInferRequest.InferRequestedOutputTensor


def rpc(name: str, method: str, request: Message, *metadata: tuple[str, str]) -> Case:
    return Case(f"grpc: {name}", lambda peer: call(peer, method, request, metadata))


def infer(name: str, model: str, *inputs: tuple[str, str, list[int], bytes], **fields: Any) -> Case:
    return rpc(f"infer, {name}", "ModelInfer", infer_request(model, *inputs, **fields))


def text(value: str) -> bytes:
    return struct.pack("<I", len(value.encode())) + value.encode()


def typed(name: str, datatype: str, values: list[Any], field: str) -> Case:
    contents = pb.InferTensorContents(**{field: values})
    tensor = Tensor(
        name=f"IN_{datatype}", datatype=datatype.replace("STRING", "BYTES"), shape=[len(values)], contents=contents
    )
    return rpc(f"contents, {name}", "ModelInfer", pb.ModelInferRequest(model_name="dtypes", inputs=[tensor]))


DESCRIBE = [
    rpc("live", "ServerLive", pb.ServerLiveRequest()),
    rpc("ready", "ServerReady", pb.ServerReadyRequest()),
    rpc("server metadata", "ServerMetadata", pb.ServerMetadataRequest()),
    *(
        rpc(f"metadata of {m}", "ModelMetadata", pb.ModelMetadataRequest(name=m))
        for m in (*MODELS, "nowhere", "broken", "")
    ),
    *(rpc(f"config of {m}", "ModelConfig", pb.ModelConfigRequest(name=m)) for m in (*MODELS, "nowhere")),
    *(rpc(f"ready: {m}", "ModelReady", pb.ModelReadyRequest(name=m)) for m in ("add_sub", "nowhere", "broken", "")),
    rpc("ready: version", "ModelReady", pb.ModelReadyRequest(name="add_sub", version="9")),
    rpc("ready: no version", "ModelReady", pb.ModelReadyRequest(name="add_sub", version="x")),
    rpc("metadata: version", "ModelMetadata", pb.ModelMetadataRequest(name="some_versions", version="1")),
    rpc("metadata: unknown version", "ModelMetadata", pb.ModelMetadataRequest(name="add_sub", version="9")),
    rpc("metadata: no version", "ModelMetadata", pb.ModelMetadataRequest(name="add_sub", version="x")),
    rpc("statistics: unknown", "ModelStatistics", pb.ModelStatisticsRequest(name="nowhere")),
    rpc("statistics: unknown version", "ModelStatistics", pb.ModelStatisticsRequest(name="add_sub", version="9")),
    rpc("trace", "TraceSetting", pb.TraceSettingRequest()),
    rpc("trace: unknown model", "TraceSetting", pb.TraceSettingRequest(model_name="nowhere")),
    rpc("logging", "LogSettings", pb.LogSettingsRequest()),
    rpc("shared memory", "SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest()),
    rpc("shared memory: unknown", "SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name="zz")),
    rpc(
        "shared memory: no such key",
        "SystemSharedMemoryRegister",
        pb.SystemSharedMemoryRegisterRequest(name="a", key="/nonexist", byte_size=8),
    ),
    rpc(
        "shared memory: unknown goes", "SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name="zz")
    ),
    rpc("CUDA shared memory", "CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest()),
    rpc("CUDA shared memory: unknown", "CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest(name="zz")),
    rpc(
        "load: unknown parameter",
        "RepositoryModelLoad",
        pb.RepositoryModelLoadRequest(
            model_name="managed", parameters={"x": pb.ModelRepositoryParameter(bool_param=True)}
        ),
    ),
    rpc("load: unknown model", "RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="nowhere")),
    rpc(
        "load: a repository",
        "RepositoryModelLoad",
        pb.RepositoryModelLoadRequest(repository_name="r", model_name="managed"),
    ),
    rpc("unload: unknown model", "RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="nowhere")),
]
INFER = [
    infer("raw", "add_sub", *PAIR),
    infer("id and version", "add_sub", *PAIR, id="7", model_version="1"),
    infer("outputs", "add_sub", *PAIR, outputs=[Output(name="OUTPUT1")]),
    infer(
        "classification",
        "add_sub",
        *PAIR,
        outputs=[Output(name="OUTPUT0", parameters={"classification": parameter(2)})],
    ),
    infer("strings", "strings", ("INPUT0", "BYTES", [2], text("é") + text(""))),
    infer(
        "parameters",
        "echo",
        id="7",
        parameters={"b": parameter(True), "i": parameter(-3), "s": parameter("x"), "d": parameter(0.5)},
        outputs=[Output(name="SEEN")],
    ),
    infer(
        "sequence",
        "echo",
        parameters={"sequence_id": parameter(42), "sequence_start": parameter(True), "sequence_end": parameter(True)},
        outputs=[Output(name="SEEN")],
    ),
    infer(
        "sequence of a string", "echo", parameters={"sequence_id": parameter("dialog")}, outputs=[Output(name="SEEN")]
    ),
    rpc(
        "infer, metadata",
        "ModelInfer",
        infer_request("echo", outputs=[Output(name="SEEN")]),
        ("x-seen", "yes"),
        ("x-other", "no"),
    ),
    infer("batch", "batched", *((f"INPUT{i}", "FP32", [2, 4], FOUR * 2) for i in (0, 1))),
    infer("reshape", "reshaped", ("INPUT0", "INT64", [1, 2, 2], struct.pack("<4q", *range(4)))),
]
CONTENTS = [
    typed("bool", "BOOL", [True, False], "bool_contents"),
    typed("uint8", "UINT8", [255, 0], "uint_contents"),
    typed("uint16", "UINT16", [65535, 0], "uint_contents"),
    typed("uint32", "UINT32", [2**32 - 1, 0], "uint_contents"),
    typed("uint64", "UINT64", [2**64 - 1, 0], "uint64_contents"),
    typed("int8", "INT8", [-128, 1], "int_contents"),
    typed("int16", "INT16", [-32768, 1], "int_contents"),
    typed("int32", "INT32", [-(2**31), 1], "int_contents"),
    typed("int64", "INT64", [-(2**63), 1], "int64_contents"),
    typed("fp32", "FP32", [0.1, -2], "fp32_contents"),
    typed("fp64", "FP64", [0.1, -2], "fp64_contents"),
    typed("bytes", "STRING", [b"a\xff", b""], "bytes_contents"),
    typed("wrong field", "INT32", [1.5], "fp32_contents"),
    typed("out of range", "UINT8", [256], "uint_contents"),
    typed("fp16", "FP16", [1.5], "fp32_contents"),
    rpc(
        "contents, both kinds",
        "ModelInfer",
        pb.ModelInferRequest(
            model_name="add_sub",
            inputs=[
                Tensor(name=n, datatype="FP32", shape=[4], contents=pb.InferTensorContents(fp32_contents=[1, 2, 3, 4]))
                for n in ("INPUT0", "INPUT1")
            ],
            raw_input_contents=[FOUR, FOUR],
        ),
    ),
    rpc(
        "contents, none",
        "ModelInfer",
        pb.ModelInferRequest(
            model_name="add_sub", inputs=[Tensor(name=n, datatype="FP32", shape=[4]) for n in ("INPUT0", "INPUT1")]
        ),
    ),
    rpc(
        "contents, too few",
        "ModelInfer",
        pb.ModelInferRequest(
            model_name="add_sub",
            inputs=[
                Tensor(name=n, datatype="FP32", shape=[4], contents=pb.InferTensorContents(fp32_contents=[1]))
                for n in ("INPUT0", "INPUT1")
            ],
        ),
    ),
]
ERRORS = [
    *(infer(f"model's error: {code}", "errors", ("CODE", "BYTES", [1, 1], text(code))) for code in (*CODES, *WAYS)),
    infer("unknown model", "nowhere", *PAIR),
    infer("failed model", "broken", *PAIR),
    infer("no model", "", *PAIR),
    infer("unknown version", "add_sub", *PAIR, model_version="9"),
    infer("no version", "add_sub", *PAIR, model_version="x"),
    infer("version zero", "add_sub", *PAIR, model_version="0"),
    infer("version minus two", "add_sub", *PAIR, model_version="-2"),
    infer("decoupled", "repeat", ("N", "INT32", [1], struct.pack("<i", 1))),
    infer("input missing", "add_sub", PAIR[0]),
    infer("input unknown", "add_sub", *PAIR, ("NOPE", "FP32", [4], FOUR)),
    infer("input twice", "add_sub", *PAIR, PAIR[0]),
    infer("output unknown", "add_sub", *PAIR, outputs=[Output(name="NOPE")]),
    infer("shape", "add_sub", PAIR[0], ("INPUT1", "FP32", [2], FOUR[:8])),
    infer("negative shape", "add_sub", PAIR[0], ("INPUT1", "FP32", [-4], FOUR)),
    infer("enormous shape", "add_sub", PAIR[0], ("INPUT1", "FP32", [2**62], FOUR)),
    infer("datatype", "add_sub", PAIR[0], ("INPUT1", "INT32", [4], FOUR)),
    infer("no datatype", "add_sub", PAIR[0], ("INPUT1", "FLOAT", [4], FOUR)),
    infer("raw too short", "add_sub", PAIR[0], ("INPUT1", "FP32", [4], FOUR[:-1])),
    infer("raw too long", "add_sub", PAIR[0], ("INPUT1", "FP32", [4], FOUR + b"x")),
    rpc(
        "infer, raw too few",
        "ModelInfer",
        pb.ModelInferRequest(
            model_name="add_sub",
            inputs=[Tensor(name=n, datatype="FP32", shape=[4]) for n in ("INPUT0", "INPUT1")],
            raw_input_contents=[FOUR],
        ),
    ),
    rpc(
        "infer, raw too many",
        "ModelInfer",
        pb.ModelInferRequest(
            model_name="add_sub",
            inputs=[Tensor(name=n, datatype="FP32", shape=[4]) for n in ("INPUT0", "INPUT1")],
            raw_input_contents=[FOUR] * 3,
        ),
    ),
    infer("strings cut off", "strings", ("INPUT0", "BYTES", [1], b"\x09\0\0\0a")),
    infer("reserved parameter", "add_sub", *PAIR, parameters={"triton_x": parameter(1)}),
    infer(
        "empty final response asked",
        "add_sub",
        *PAIR,
        parameters={"triton_enable_empty_final_response": parameter(True)},
    ),
    infer("timeout is text", "add_sub", *PAIR, parameters={"timeout": parameter("soon")}),
    infer("priority is negative", "add_sub", *PAIR, parameters={"priority": parameter(-1)}),
    infer("sequence id is a boolean", "add_sub", *PAIR, parameters={"sequence_id": parameter(True)}),
    infer(
        "classification is text",
        "add_sub",
        *PAIR,
        outputs=[Output(name="OUTPUT0", parameters={"classification": parameter("2")})],
    ),
    infer(
        "shared memory unknown",
        "add_sub",
        *PAIR,
        outputs=[
            Output(
                name="OUTPUT0",
                parameters={"shared_memory_region": parameter("zz"), "shared_memory_byte_size": parameter(16)},
            )
        ],
    ),
]


def health(method: str) -> Case:
    def run(peer: Peer) -> Any:
        with grpc.insecure_channel(peer.grpc) as channel:
            answers = getattr(health_pb2_grpc.HealthStub(channel), method)(health_pb2.HealthCheckRequest(), timeout=20)
            try:
                return message(answers if method == "Check" else next(answers))
            except grpc.RpcError as error:
                return status(error)

    return Case(f"grpc: health, {method}", run)


CASES = [*DESCRIBE, *INFER, *CONTENTS, *ERRORS, health("Check"), health("Watch")]
