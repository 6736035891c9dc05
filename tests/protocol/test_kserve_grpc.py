"""inference.GRPCInferenceService as Triton's clients see it: all methods but the stream."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf import json_format
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha import reflection_pb2
from tritonclient.grpc import aio
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.utils import InferenceServerException

from penstock.engines.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    NotReadyError,
    QueueFullError,
    QueueTimeoutError,
    UnknownError,
)
from penstock.gateway.apis.kserve.store import IndexEntry
from penstock.gateway.apis.kserve.tracing import Tracing
from support.grpc import (
    SECONDS,
    add_sub_request,
    each,
    failure,
    floats,
    infer_request,
    kserve_of,
    read_all,
    repeat_request,
    serving,
    transport,  # noqa: F401
)
from support.kserve import add_sub, identity, repeat


def inputs_of() -> list[object]:
    found = []
    for name, value in (("INPUT0", 3), ("INPUT1", 1)):
        tensor = aio.InferInput(name, [16], "FP32")
        tensor.set_data_from_numpy(floats(value))
        found.append(tensor)
    return found


async def test_infer_with_tritonclient() -> None:
    async with serving(add_sub()) as running, running.client() as client:
        result = await client.infer("add_sub", inputs_of(), request_id="abc", client_timeout=SECONDS)
        assert result.as_numpy("OUTPUT0").tolist() == [4.0] * 16
        assert result.as_numpy("OUTPUT1").tolist() == [2.0] * 16
        response = result.get_response()
        assert (response.model_name, response.model_version, response.id) == ("add_sub", "1", "abc")
        assert len(response.raw_output_contents) == 2
        assert not any(output.HasField("contents") for output in response.outputs)


async def test_only_the_requested_outputs_in_the_requested_order() -> None:
    async with serving(add_sub()) as running, running.client() as client:
        wanted = [aio.InferRequestedOutput("OUTPUT1"), aio.InferRequestedOutput("OUTPUT0")]
        result = await client.infer("add_sub", inputs_of(), outputs=wanted)
        assert [output.name for output in result.get_response().outputs] == ["OUTPUT1", "OUTPUT0"]
        assert result.as_numpy("OUTPUT1").tolist() == [2.0] * 16


async def test_live_ready_and_health_follow_the_server() -> None:
    async with serving(add_sub()) as running, running.client() as client:
        health = health_pb2_grpc.HealthStub(running.channel)
        assert await client.is_server_live()
        assert await client.is_server_ready()
        for service in ("", "inference.GRPCInferenceService", "anything"):
            status = (await health.Check(HealthCheckRequest(service=service))).status
            assert status == HealthCheckResponse.SERVING
        running.ready = False
        assert await client.is_server_live()
        assert not await client.is_server_ready()
        assert (await health.Check(HealthCheckRequest())).status == HealthCheckResponse.NOT_SERVING


async def test_health_watch_tells_every_change() -> None:
    async with serving(add_sub()) as running:
        watch = health_pb2_grpc.HealthStub(running.channel).Watch(HealthCheckRequest())
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        running.ready = False
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        running.ready = True
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        await running.server.drain()
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        watch.cancel()


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
async def test_reflection_lists_and_describes_the_services(version: str) -> None:
    async with serving(add_sub()) as running:
        call = running.channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= names
        symbol = "inference.GRPCInferenceService"
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
        assert (await call.read()).file_descriptor_response.file_descriptor_proto
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_model_ready() -> None:
    model = add_sub()
    async with serving(model) as running, running.client() as client:
        assert await client.is_model_ready("add_sub")
        assert await client.is_model_ready("add_sub", "1")
        assert not await client.is_model_ready("nope")
        assert not await client.is_model_ready("add_sub", "9")
        model.says_ready = False
        assert not await client.is_model_ready("add_sub")
        model.says_ready = True
        model.ready = False
        assert not await client.is_model_ready("add_sub")
        request = pb.ModelReadyRequest(name="add_sub", version="x")
        assert await failure(running.stub.ModelReady(request)) == (
            "INVALID_ARGUMENT",
            "failed to get model version from specified version string 'x' (details: stol), version should be an "
            "integral value > 0",
        )


async def test_metadata_and_configuration() -> None:
    async with serving(add_sub(), add_sub(version=2)) as running, running.client() as client:
        server = await client.get_server_metadata()
        assert server.name == "penstock"
        assert "binary_tensor_data" in server.extensions
        metadata = await client.get_model_metadata("add_sub", as_json=True)
        assert metadata["versions"] == ["1", "2"]
        assert metadata["platform"] == "python"
        assert metadata["inputs"][0] == {"name": "INPUT0", "datatype": "FP32", "shape": ["16"]}
        config = (await client.get_model_config("add_sub")).config
        assert config == running.store.model("add_sub").config
        for method, request in (
            (running.stub.ModelMetadata, pb.ModelMetadataRequest(name="zz")),
            (running.stub.ModelConfig, pb.ModelConfigRequest(name="zz")),
        ):
            assert await failure(method(request)) == ("NOT_FOUND", "Request for unknown model: 'zz' is not found")


async def test_statistics() -> None:
    model = add_sub()
    model.statistics.executed(2, 1, 2, 3)
    async with serving(model) as running, running.client() as client:
        found = (await client.get_inference_statistics("add_sub")).model_stats
        assert json_format.MessageToDict(found[0])["batchStats"][0]["batchSize"] == "2"
        assert found[0].execution_count == 1
        assert len((await client.get_inference_statistics()).model_stats) == 1
        assert await failure(running.stub.ModelStatistics(pb.ModelStatisticsRequest(name="zz"))) == (
            "INVALID_ARGUMENT",
            "requested model 'zz' is not available",
        )


async def test_repository() -> None:
    async with serving(add_sub()) as running, running.client() as client:
        running.store.entries.append(IndexEntry("cold"))
        index = (await client.get_model_repository_index()).models
        assert [(each.name, each.version, each.state) for each in index] == [
            ("add_sub", "1", "READY"),
            ("cold", "", ""),
        ]
        ready = await running.stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True))
        assert [each.name for each in ready.models] == ["add_sub"]
        await client.load_model("m", config='{"backend":"onnxruntime"}', files={"file:1/model.onnx": b"\0\1"})
        await client.load_model("plain")
        assert running.store.loads == [
            ("m", '{"backend":"onnxruntime"}', {"1/model.onnx": b"\0\1"}),
            ("plain", None, None),
        ]
        await client.unload_model("m", unload_dependents=True)
        assert running.store.unloads == [("m", True)]


async def test_repository_refusals() -> None:
    async with serving(add_sub()) as running:
        stub = running.stub
        for method, request in (
            (stub.RepositoryIndex, pb.RepositoryIndexRequest(repository_name="r")),
            (stub.RepositoryModelLoad, pb.RepositoryModelLoadRequest(repository_name="r", model_name="m")),
            (stub.RepositoryModelUnload, pb.RepositoryModelUnloadRequest(repository_name="r", model_name="m")),
        ):
            said = ("UNIMPLEMENTED", "'repository_name' specification is not supported")
            assert await failure(method(request)) == said
        load = pb.RepositoryModelLoadRequest(model_name="m")
        load.parameters["zz"].bool_param = True
        assert await failure(stub.RepositoryModelLoad(load)) == (
            "INVALID_ARGUMENT",
            "unrecognized load parameter 'zz'.",
        )
        load = pb.RepositoryModelLoadRequest(model_name="m")
        load.parameters["config"].bool_param = True
        assert await failure(stub.RepositoryModelLoad(load)) == (
            "INVALID_ARGUMENT",
            "invalid value type for load parameter 'config', expected string_param.",
        )
        running.store.load_error = NotReadyError("explicit model load / unload is not allowed if polling is enabled")
        assert await failure(stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="m"))) == (
            "UNAVAILABLE",
            "explicit model load / unload is not allowed if polling is enabled",
        )
        assert running.store.loads == [("m", None, None)]


async def test_shared_memory_rpcs() -> None:
    async with serving(add_sub()) as running, running.client() as client:
        assert not (await client.get_system_shared_memory_status()).regions
        assert not (await client.get_cuda_shared_memory_status()).regions
        stub = running.stub
        assert await failure(stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest(name="zz"))) == (
            "NOT_FOUND",
            "Unable to find system shared memory region: 'zz'",
        )
        request = pb.SystemSharedMemoryRegisterRequest(name="zz", key="/nonexist", byte_size=8)
        assert await failure(stub.SystemSharedMemoryRegister(request)) == (
            "INVALID_ARGUMENT",
            "Unable to open shared memory region: '/nonexist'",
        )
        cuda = pb.CudaSharedMemoryRegisterRequest(name="zz", raw_handle=b"x", byte_size=8)
        assert (await failure(stub.CudaSharedMemoryRegister(cuda)))[0] == "UNIMPLEMENTED"
        await client.unregister_system_shared_memory("zz")
        await client.unregister_cuda_shared_memory()


async def test_tensors_in_shared_memory() -> None:
    from tritonclient.utils import shared_memory as shm

    handle = shm.create_shared_memory_region("data", "/grpc_test_region", 256)
    try:
        shm.set_shared_memory_region(handle, [floats(3), floats(1)])
        async with serving(add_sub()) as running, running.client() as client:
            await client.register_system_shared_memory("data", "/grpc_test_region", 256)
            status = (await client.get_system_shared_memory_status("data")).regions["data"]
            assert (status.key, status.byte_size) == ("/grpc_test_region", 256)
            inputs = [aio.InferInput(name, [16], "FP32") for name in ("INPUT0", "INPUT1")]
            inputs[0].set_shared_memory("data", 64)
            inputs[1].set_shared_memory("data", 64, 64)
            output = aio.InferRequestedOutput("OUTPUT0")
            output.set_shared_memory("data", 64, 128)
            result = await client.infer("add_sub", inputs, outputs=[output, aio.InferRequestedOutput("OUTPUT1")])
            assert shm.get_contents_as_numpy(handle, np.float32, [16], 128).tolist() == [4.0] * 16
            assert result.get_output("OUTPUT0").parameters["shared_memory_region"].string_param == "data"
            assert result.as_numpy("OUTPUT1").tolist() == [2.0] * 16
            output.set_shared_memory("data", 32, 128)
            with pytest.raises(InferenceServerException, match="at least 64 bytes"):
                await client.infer("add_sub", inputs, outputs=[output])
            inputs[1].set_shared_memory("data", 64, 224)
            with pytest.raises(InferenceServerException, match="Invalid offset"):
                await client.infer("add_sub", inputs)
    finally:
        shm.destroy_shared_memory_region(handle)


async def test_trace_and_log_settings() -> None:
    async with serving(add_sub()) as running, running.client() as client:
        found = await client.update_trace_settings("add_sub", {"trace_level": ["TIMESTAMPS"], "trace_rate": "5"})
        assert list(found.settings["trace_level"].value) == ["TIMESTAMPS"]
        assert list(found.settings["trace_rate"].value) == ["5"]
        assert list((await client.get_trace_settings()).settings["trace_level"].value) == ["OFF"]
        cleared = await client.update_trace_settings("add_sub", {"trace_rate": None, "trace_level": None})
        assert list(cleared.settings["trace_rate"].value) == ["1000"]
        assert await failure(running.stub.TraceSetting(pb.TraceSettingRequest(model_name="zz"))) == (
            "INVALID_ARGUMENT",
            "Request for unknown model : zz",
        )
        before = (await client.get_log_settings()).settings
        assert before["log_format"].string_param == "default"
        changed = (await client.update_log_settings({"log_verbose_level": 1})).settings
        assert changed["log_verbose_level"].uint32_param == 1
        await client.update_log_settings({"log_verbose_level": before["log_verbose_level"].uint32_param})
        bad = pb.LogSettingsRequest()
        bad.settings["log_info"].string_param = "x"
        assert await failure(running.stub.LogSettings(bad)) == ("INVALID_ARGUMENT", "log_info must be a boolean")


async def test_what_model_infer_refuses() -> None:
    async with serving(add_sub(), repeat()) as running:
        infer = running.stub.ModelInfer
        assert await failure(infer(repeat_request(1))) == (
            "UNIMPLEMENTED",
            "ModelInfer RPC doesn't support models with decoupled transaction policy",
        )
        assert await failure(infer(pb.ModelInferRequest(model_name="zz"))) == (
            "NOT_FOUND",
            "Request for unknown model: 'zz' is not found",
        )
        assert await failure(infer(add_sub_request(triton_x=True))) == (
            "INVALID_ARGUMENT",
            "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting "
            "with 'triton_' are allowed: triton_enable_empty_final_response",
        )
        few = infer_request("add_sub", {"INPUT0": floats()})
        assert (await failure(infer(few)))[1].startswith("[request id: 7] expected 2 inputs but got 1 inputs for model")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequestError("no"), "INVALID_ARGUMENT"),
        (QueueFullError("Exceeds maximum queue size"), "UNAVAILABLE"),
        (QueueTimeoutError("Request timeout expired"), "UNAVAILABLE"),
        (DeadlineExceededError("too late"), "DEADLINE_EXCEEDED"),
        (EngineError("An Error Occurred"), "INTERNAL"),
        (UnknownError("model says"), "UNKNOWN"),
    ],
)
async def test_errors_of_models_as_statuses(error: Exception, status: str) -> None:
    model = add_sub()
    model.error = error  # type: ignore[assignment]
    async with serving(model) as running:
        assert await failure(running.stub.ModelInfer(add_sub_request())) == (status, str(error))


async def test_an_unexpected_exception_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = add_sub()
    model.error = OSError(2, "No such file", "/secret/path")  # type: ignore[assignment]
    async with serving(model) as running:
        status, details = await failure(running.stub.ModelInfer(add_sub_request()))
        assert status == "INTERNAL"
        assert "/secret" not in details
        assert "OSError" not in details
    assert "/secret/path" in caplog.text


async def test_parameters_reach_the_model_and_come_back() -> None:
    model = add_sub()
    model.response_parameters = {"a": 1, "b": "x", "c": True, "d": 0.5, "e": 2**63}
    async with serving(model) as running:
        request = add_sub_request(
            own=-2, text="x", flag=True, ratio=1.5, big=("uint64_param", 2**63), priority=3, timeout=1000
        )
        response = await running.stub.ModelInfer(request)
        (seen,) = model.requests
        assert seen.parameters == {"own": -2, "text": "x", "flag": True, "ratio": 1.5, "big": 2**63}
        assert (seen.priority, seen.timeout_us, seen.id) == (3, 1000, "7")
        kinds = {name: each.WhichOneof("parameter_choice") for name, each in response.parameters.items()}
        assert kinds == {
            "a": "int64_param",
            "b": "string_param",
            "c": "bool_param",
            "d": "double_param",
            "e": "uint64_param",
        }


async def test_classification() -> None:
    model = identity("FP32", max_batch_size=8)
    async with serving(model) as running, running.client() as client:
        tensor = aio.InferInput("INPUT0", [2, 3], "FP32")
        tensor.set_data_from_numpy(np.array([[1, 5, 3], [9, 2, 4]], np.float32))
        wanted = aio.InferRequestedOutput("OUTPUT0", class_count=2)
        result = await client.infer(model.name, [tensor], outputs=[wanted])
        assert result.as_numpy("OUTPUT0").tolist() == [
            [b"5.000000:1", b"3.000000:2"],
            [b"9.000000:0", b"4.000000:2"],
        ]


async def test_traces_of_both_ways_to_infer(tmp_path: Path) -> None:
    tracing = Tracing(str(tmp_path / "trace.json"))
    tracing.update({"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "1"})
    model = add_sub()
    async with serving(kserve=kserve_of(model, tracing=tracing)) as running:
        await running.stub.ModelInfer(add_sub_request("one"))
        await read_all(running.stub.ModelStreamInfer(each([add_sub_request("two")])))
        model.error = EngineError("An Error Occurred")
        await failure(running.stub.ModelInfer(add_sub_request("three")))
    tracing.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    assert [event["request_id"] for event in events if "request_id" in event] == ["one", "two", "three"]
    for number in (1, 2):
        own = [event for event in events if event["id"] == number]
        marks = [mark["name"] for event in own for mark in event.get("timestamps", ())]
        assert marks[:2] == ["GRPC_WAITREAD_END", "REQUEST_START"]
        assert "REQUEST_END" in marks
        activities = [event["activity"] for event in own if "activity" in event]
        assert activities == ["TENSOR_QUEUE_INPUT"] * 2 + ["TENSOR_BACKEND_OUTPUT"] * 2


async def test_many_strings() -> None:
    model = identity("BYTES")
    items = np.array([str(index).encode() for index in range(200_000)], np.object_)
    async with serving(model) as running:
        options = [("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(running.address, options=options) as channel:
            request = infer_request(model.name, {"INPUT0": items})
            answer = await GRPCInferenceServiceStub(channel).ModelInfer(request)
            assert answer.raw_output_contents[0] == request.raw_input_contents[0]
            assert model.requests[0].inputs["INPUT0"].array.tolist() == items.tolist()


async def test_hostile_bytes_are_refused_and_the_server_lives_on() -> None:
    async with serving(add_sub()) as running:
        for method in ("ModelInfer", "ModelMetadata", "RepositoryModelLoad", "LogSettings"):
            raw = running.channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            assert await failure(raw(b"\xff" * 30)) == ("INVALID_ARGUMENT", "the request message cannot be decoded")
        unknown = running.channel.unary_unary("/inference.GRPCInferenceService/Nope")
        assert (await failure(unknown(b"")))[0] == "UNIMPLEMENTED"
        repeated = running.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        assert (await failure(repeated(b"\x0a\x00" * 5_000)))[0] == "NOT_FOUND"
        assert await failure(repeated(b"\x0a\x00" * 50_000)) == (
            "INVALID_ARGUMENT",
            "the request has more than 16384 fields",
        )
        assert (await running.stub.ModelInfer(add_sub_request())).id == "7"
