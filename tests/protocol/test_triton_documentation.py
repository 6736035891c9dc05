"""What the client examples of Triton's documentation do, with models made again after it (support/documented.py)."""

from __future__ import annotations

import asyncio
import json
import queue
import re
import uuid
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, serialize_byte_tensor, shared_memory

from support.documented import LABELS, write_repository
from support.server import Server, serving, wait_until

COUNT = np.arange(16, dtype=np.int32).reshape(1, 16)
ONES = np.ones((1, 16), np.int32)
VALUES = [11, 7, 5, 3, 2, 0, 1]
SUMS = [11, 18, 23, 26, 28, 28, 29]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("documented")
    write_repository(folder)
    flags = ("--model-control-mode=explicit", "--load-model=*", "--allow-client-shm")
    with serving("--model-repository", str(folder), *flags) as server:
        yield server


class Protocol:
    """One of the two client libraries, with a client of it."""

    def __init__(self, server: Server, name: str) -> None:
        self.name = name
        self.module: Any = triton_http if name == "http" else triton_grpc
        self.address = server.url.removeprefix("http://") if name == "http" else server.grpc
        self.client = self.module.InferenceServerClient(self.address)

    def inputs(self, **arrays: np.ndarray[Any, Any]) -> list[Any]:
        return inputs(self.module, **arrays)


def inputs(module: Any, **arrays: np.ndarray[Any, Any]) -> list[Any]:
    made = [
        module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)) for name, array in arrays.items()
    ]
    for each, array in zip(made, arrays.values(), strict=True):
        each.set_data_from_numpy(array)
    return made


def int32(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int32)


def digits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.array([[str(value).encode() for value in row] for row in array], np.object_)


@pytest.fixture(params=["http", "grpc"])
def protocol(server: Server, request: pytest.FixtureRequest) -> Iterator[Protocol]:
    made = Protocol(server, request.param)
    yield made
    made.client.close()


# -- one request, one answer: simple_*_infer, _async_infer, _string_infer, explicit contents, reuse_infer_objects


def test_simple_infer(protocol: Protocol) -> None:
    pair = protocol.inputs(INPUT0=COUNT, INPUT1=ONES)
    wanted = [protocol.module.InferRequestedOutput(name) for name in ("OUTPUT0", "OUTPUT1")]
    found = protocol.client.infer("simple", pair, outputs=wanted, request_id="1", headers={"test": "1"})
    response = found.get_response()
    assert (response["id"] if protocol.name == "http" else response.id) == "1"
    assert (found.as_numpy("OUTPUT0") == COUNT + ONES).all()
    assert (found.as_numpy("OUTPUT1") == COUNT - ONES).all()
    assert found.as_numpy("OUTPUT2") is None
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'wrong_model_name' is not found"):
        protocol.client.infer("wrong_model_name", pair)


def test_json_tensors_and_compression(server: Server) -> None:
    with triton_http.InferenceServerClient(server.url.removeprefix("http://")) as client:
        pair = inputs(triton_http, INPUT0=COUNT, INPUT1=ONES)
        pair[0].set_data_from_numpy(COUNT, binary_data=False)
        wanted = [triton_http.InferRequestedOutput("OUTPUT0", binary_data=False)]
        ways = {"request_compression_algorithm": "deflate", "response_compression_algorithm": "gzip"}
        found = client.infer("simple", pair, outputs=wanted, query_params={"test_1": 1}, **ways)
    assert (found.as_numpy("OUTPUT0") == COUNT + ONES).all()


def test_async_infer(protocol: Protocol) -> None:
    pair = protocol.inputs(INPUT0=COUNT, INPUT1=ONES)
    if protocol.name == "http":
        with triton_http.InferenceServerClient(protocol.address, concurrency=4) as client:
            results = [request.get_result() for request in [client.async_infer("simple", pair) for _ in range(4)]]
    else:
        answers: queue.Queue[Any] = queue.Queue()
        for _ in range(4):
            protocol.client.async_infer("simple", pair, lambda result, error: answers.put((result, error)))
        found = [answers.get(timeout=20) for _ in range(4)]
        assert [error for _, error in found] == [None] * 4
        results = [result for result, _ in found]
    assert all((result.as_numpy("OUTPUT1") == COUNT - ONES).all() for result in results)


def test_strings_are_added_as_numbers_and_any_bytes_come_back(protocol: Protocol) -> None:
    found = protocol.client.infer("simple_string", protocol.inputs(INPUT0=digits(COUNT), INPUT1=digits(ONES)))
    assert [int(value) for value in found.as_numpy("OUTPUT0")[0]] == (COUNT + ONES)[0].tolist()
    any_bytes = np.array([[b"\x00\xff", "\u00e9\u20ac".encode(), b""]], np.object_)
    echoed = protocol.client.infer("simple_identity", protocol.inputs(INPUT0=any_bytes)).as_numpy("OUTPUT0")
    assert echoed.tolist() == any_bytes.tolist()


def test_explicit_contents(server: Server) -> None:
    """The stubs that protoc makes, without the client library above them."""
    tensor = service_pb2.ModelInferRequest.InferInputTensor
    numbers = service_pb2.InferTensorContents(int_contents=range(16))
    texts = service_pb2.InferTensorContents(bytes_contents=[b"a\xff", b""])
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        pair = [tensor(name=name, datatype="INT32", shape=[1, 16], contents=numbers) for name in ("INPUT0", "INPUT1")]
        answer = stub.ModelInfer(service_pb2.ModelInferRequest(model_name="simple", model_version="", inputs=pair))
        one = [tensor(name="INPUT0", datatype="BYTES", shape=[1, 2], contents=texts)]
        echoed = stub.ModelInfer(service_pb2.ModelInferRequest(model_name="simple_identity", inputs=one))
    assert np.frombuffer(answer.raw_output_contents[0], np.int32).tolist() == (2 * COUNT)[0].tolist()
    assert echoed.raw_output_contents == [b"\2\0\0\0a\xff\0\0\0\0"]


def test_requests_of_different_lengths_share_a_batch(server: Server) -> None:
    rows = [np.arange(length, dtype=np.float32).reshape(1, length) for length in (3, 4, 5)]
    with triton_http.InferenceServerClient(server.url.removeprefix("http://"), concurrency=3) as client:
        sent = [client.async_infer("ragged_sums", inputs(triton_http, INPUT=row)) for row in rows]
        found = [request.get_result().as_numpy("OUTPUT").tolist() for request in sent]
        executed = client.get_inference_statistics("ragged_sums")["model_stats"][0]["batch_stats"]
    assert found == [[[3.0]], [[6.0]], [[10.0]]]
    assert [each["batch_size"] for each in executed] == [3]


def test_clients_of_asyncio(server: Server) -> None:
    async def ask(module: Any, library: Any, address: str) -> Any:
        async with module.InferenceServerClient(address) as client:
            assert [await client.is_server_ready(), await client.is_model_ready("simple")] == [True, True]
            pair = inputs(library, INPUT0=COUNT, INPUT1=ONES)
            found = await asyncio.gather(*(client.infer("simple", pair) for _ in range(4)))
            return [result.as_numpy("OUTPUT0").tolist() for result in found]

    ways = (
        (triton_http_aio, triton_http, server.url.removeprefix("http://")),
        (triton_grpc_aio, triton_grpc, server.grpc),
    )
    for way in ways:
        assert asyncio.run(ask(*way)) == [(COUNT + ONES).tolist()] * 4


# -- shared memory: simple_*_shm_client, simple_*_shm_string_client, reuse_infer_objects_client


def test_tensors_in_shared_memory_and_objects_that_are_used_again(protocol: Protocol) -> None:
    size = COUNT.nbytes
    with Region(protocol, 3 * size) as region:
        shared_memory.set_shared_memory_region(region.handle, [COUNT, ONES])
        pair = protocol.inputs(INPUT0=ONES, INPUT1=ONES)
        wanted = [protocol.module.InferRequestedOutput("OUTPUT0")]
        for index, each in enumerate(pair):
            each.set_shared_memory(region.name, size, offset=index * size)
        wanted[0].set_shared_memory(region.name, size, offset=2 * size)
        found = protocol.client.infer("simple", pair, outputs=wanted)
        assert found.get_output("OUTPUT0") is not None
        assert (region.array(np.int32, [1, 16], 2 * size) == COUNT + ONES).all()
        pair[0].set_data_from_numpy(ONES)
        wanted[0].unset_shared_memory()
        assert (protocol.client.infer("simple", pair, outputs=wanted).as_numpy("OUTPUT0") == 2 * ONES).all()


def test_strings_in_shared_memory(protocol: Protocol) -> None:
    left, right = (serialize_byte_tensor(digits(array)) for array in (COUNT, ONES))
    sizes = [len(each.item()) for each in (left, right)]
    with Region(protocol, 1024) as region:
        shared_memory.set_shared_memory_region(region.handle, [left, right])
        pair = protocol.inputs(INPUT0=digits(COUNT), INPUT1=digits(ONES))
        pair[0].set_shared_memory(region.name, sizes[0])
        pair[1].set_shared_memory(region.name, sizes[1], offset=sizes[0])
        wanted = [protocol.module.InferRequestedOutput("OUTPUT0")]
        wanted[0].set_shared_memory(region.name, 512, offset=512)
        protocol.client.infer("simple_string", pair, outputs=wanted)
        found = region.array(np.object_, [1, 16], 512)
        assert [int(value) for value in found[0]] == (COUNT + ONES)[0].tolist()


class Region:
    """A region of shared memory that both sides have, until the end of the block."""

    def __init__(self, protocol: Protocol, size: int) -> None:
        self.client = protocol.client
        self.name = f"documented_{uuid.uuid4().hex[:12]}"
        self.handle = shared_memory.create_shared_memory_region(self.name, f"/{self.name}", size)
        self.client.register_system_shared_memory(self.name, f"/{self.name}", size)

    def array(self, dtype: Any, shape: list[int], offset: int) -> np.ndarray[Any, Any]:
        return shared_memory.get_contents_as_numpy(self.handle, dtype, shape, offset).copy()

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.unregister_system_shared_memory(self.name)
        shared_memory.destroy_shared_memory_region(self.handle)


# -- simple_*_health_metadata, simple_*_model_control


def test_health_and_metadata(protocol: Protocol) -> None:
    client, options = protocol.client, {} if protocol.name == "http" else {"as_json": True}
    assert client.is_server_live(headers={"test": "1"})
    assert client.is_server_ready()
    assert client.is_model_ready("simple")
    assert "classification" in client.get_server_metadata(**options)["extensions"]
    assert client.get_model_metadata("simple", **options)["platform"] == "onnxruntime_onnx"
    config = client.get_model_config("simple", **options)
    assert (config if protocol.name == "http" else config["config"])["max_batch_size"] == 8
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'wrong_model_name' is not found"):
        client.get_model_metadata("wrong_model_name")


def test_model_control(protocol: Protocol) -> None:
    client, options = protocol.client, {} if protocol.name == "http" else {"as_json": True}
    index = client.get_model_repository_index(**options)
    assert "simple_identity" in [model["name"] for model in (index if protocol.name == "http" else index["models"])]
    client.unload_model("simple_identity")
    wait_until(lambda: not client.is_model_ready("simple_identity"))
    client.load_model("simple_identity")
    assert client.is_model_ready("simple_identity")
    config = client.get_model_config("simple_identity", **options)
    config = config if protocol.name == "http" else config["config"]
    client.load_model("simple_identity", config=json.dumps(config | {"max_batch_size": 2}))
    changed = client.get_model_config("simple_identity", **options)
    assert (changed if protocol.name == "http" else changed["config"])["max_batch_size"] == 2
    client.load_model("simple_identity")
    with pytest.raises(InferenceServerException, match="'wrong_model_name'"):
        client.load_model("wrong_model_name")


# -- image_client, ensemble_image_client


@pytest.mark.parametrize("colour", range(3))
def test_an_image_is_classified_with_labels(protocol: Protocol, colour: int) -> None:
    image = np.zeros((3, 32, 32), np.float32)
    image[colour] = 1
    wanted = [protocol.module.InferRequestedOutput("fc6_1", class_count=2)]
    found = protocol.client.infer("densenet_onnx", protocol.inputs(data_0=image), outputs=wanted).as_numpy("fc6_1")
    best = [entry.decode().split(":") for entry in found]
    assert best[0] == ["2.000000", str(colour), LABELS[colour]]
    assert best[1][2] == "GREY"


def test_an_ensemble_takes_the_file_of_an_image(protocol: Protocol) -> None:
    file = b"P6\n32 32\n255\n" + bytes([0, 255, 0]) * 1024
    wanted = [protocol.module.InferRequestedOutput("CLASSIFICATION", class_count=1)]
    sent = protocol.inputs(INPUT=np.array([file], np.object_))
    found = protocol.client.infer("preprocess_densenet_ensemble", sent, outputs=wanted)
    assert found.as_numpy("CLASSIFICATION").tolist() == [b"2.000000:1:GREEN"]
    with pytest.raises(InferenceServerException, match="INPUT is no image of 32 x 32 pixels"):
        protocol.client.infer("preprocess_densenet_ensemble", protocol.inputs(INPUT=np.array([b"GIF"], np.object_)))


# -- simple_grpc_sequence_stream, simple_*_sequence_sync


@pytest.mark.parametrize(
    ("model", "ids", "extra"),
    [
        ("simple_sequence", (1000, 1001), (0, 0)),
        ("simple_sequence", ("1002", "a dialog"), (0, 0)),
        ("sequence_state", (1003, 1004), (0, 0)),
        ("simple_dyna_sequence", (1005, 1006), (1005, 1006)),
        ("simple_string_dyna_sequence", ("7", "8"), (7, 8)),
    ],
)
def test_two_sequences_on_one_stream(server: Server, model: str, ids: tuple[Any, Any], extra: tuple[int, int]) -> None:
    """The second one has the values of the first with their signs changed."""
    answers: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for index, value in enumerate(VALUES):
            for sign, id in zip((1, -1), ids, strict=True):
                flags = {"sequence_start": index == 0, "sequence_end": index == len(VALUES) - 1}
                sent = inputs(triton_grpc, INPUT=int32(sign * value).reshape(1, 1))
                client.async_stream_infer(model, sent, request_id=f"{id}_{index}", sequence_id=id, **flags)
        found: dict[str, list[int]] = {str(id): [] for id in ids}
        for _ in range(2 * len(VALUES)):
            result, error = answers.get(timeout=20)
            assert error is None
            found[result.get_response().id.split("_")[0]].append(int(result.as_numpy("OUTPUT")[0, 0]))
        client.stop_stream()
    expected = [[sign * value for value in SUMS] for sign in (1, -1)]
    for sums, more in zip(expected, extra, strict=True):
        sums[-1] += more
    assert list(found.values()) == expected


def test_a_sequence_request_by_request(protocol: Protocol) -> None:
    found = []
    for index, value in enumerate(VALUES):
        flags = {"sequence_id": 2000, "sequence_start": index == 0, "sequence_end": index == len(VALUES) - 1}
        sent = protocol.inputs(INPUT=int32(value).reshape(1, 1))
        found.append(int(protocol.client.infer("simple_sequence", sent, **flags).as_numpy("OUTPUT")[0, 0]))
    assert found == SUMS


# -- simple_grpc_custom_repeat, the decoupled examples, cancellation, keepalive, custom arguments


def repeat(values: np.ndarray[Any, Any], *delays_ms: int) -> list[Any]:
    delays = np.array(delays_ms or (0,) * len(values), np.uint32)
    return inputs(triton_grpc, IN=values, DELAY=delays, WAIT=np.array([0], np.uint32))


def test_repeat_and_square_stream_their_responses(server: Server) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("repeat_int32", repeat(int32(4, 2, 0, 1)), request_id="repeat")
        client.async_stream_infer("square_int32", inputs(triton_grpc, IN=int32(3)), request_id="square")
        found: dict[str, list[Any]] = {"repeat": [], "square": []}
        for _ in range(4 + 3):
            result, error = answers.get(timeout=20)
            assert error is None
            names = ("OUT", "IDX") if result.get_response().id == "repeat" else ("OUT",)
            found[result.get_response().id].append([int(result.as_numpy(name)[0]) for name in names])
        client.stop_stream()
    assert found == {"repeat": [[4, 0], [2, 1], [0, 2], [1, 3]], "square": [[3]] * 3}


def test_a_decoupled_model_has_no_single_answer(protocol: Protocol) -> None:
    with pytest.raises(InferenceServerException, match="doesn't support models with decoupled transaction policy"):
        protocol.client.infer("square_int32", protocol.inputs(IN=int32(1)))


def test_what_is_cancelled_ends_and_is_counted(server: Server) -> None:
    answers: queue.Queue[Any] = queue.Queue()

    def cancelled() -> bool:
        sample = r'nv_inference_request_failure{model="repeat_int32",reason="CANCELED",version="1"} 1\b'
        return re.search(sample, httpx.get(server.operator + "/metrics").text) is not None

    with triton_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("repeat_int32", repeat(int32(1, 2), 0, 60_000))
        assert answers.get(timeout=20)[1] is None
        client.stop_stream(cancel_requests=True)
        assert answers.get(timeout=20)[1].status() == "StatusCode.CANCELLED"
        wait_until(cancelled)


def test_keepalive_and_channel_arguments(server: Server) -> None:
    keepalive = triton_grpc.KeepAliveOptions(2**31 - 1, 20_000, False, 2)
    with triton_grpc.InferenceServerClient(server.grpc, keepalive_options=keepalive) as client:
        assert client.is_server_live()
    arguments = [("grpc.lb_policy_name", "pick_first"), ("grpc.max_send_message_length", 1 << 20)]
    with triton_grpc.InferenceServerClient(server.grpc, channel_args=arguments) as client:
        assert client.infer("simple", inputs(triton_grpc, INPUT0=COUNT, INPUT1=ONES)).as_numpy("OUTPUT0") is not None


# -- the generate extension, business logic scripting, iterative sequences


def test_generate_answers_once_and_its_stream_as_often_as_the_model_does(server: Server) -> None:
    body = {"INPUT0": ["a", "b"], "id": "5", "temperature": 0.5, "parameters": {"stop": True}}
    answer = server.post("/v2/models/simple_identity/generate", body)
    given = json.loads(answer.json().pop("given"))
    assert answer.json() | {"given": given} == {
        "OUTPUT0": ["a", "b"],
        "given": {"temperature": 0.5, "stop": True},
        "id": "5",
        "model_name": "simple_identity",
        "model_version": "1",
    }
    stream = server.post("/v2/models/square_int32/generate_stream", {"IN": 2})
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert stream.text == 'data: {"OUT":2,"model_name":"square_int32","model_version":"1"}\n\n' * 2
    several = server.post("/v2/models/square_int32/generate", {"IN": 2})
    assert (several.status_code, "exactly 1 response" in several.json()["error"]) == (400, True)


@pytest.mark.parametrize(("how", "total"), [("exec", 6), ("async_exec", 12), ("decoupled", 9)])
def test_a_model_asks_others(protocol: Protocol, how: str, total: int) -> None:
    sent = protocol.inputs(IN=int32(3), HOW=np.array([how.encode()], np.object_))
    assert protocol.client.infer("bls", sent).as_numpy("OUT").tolist() == [total]


def test_an_iterative_sequence(server: Server) -> None:
    with httpx.stream("POST", f"{server.url}/v2/models/iterative_sequence/generate_stream", json={"IN": 3}) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line]
    assert [event["OUT"] for event in events] == [3, 2, 1]
