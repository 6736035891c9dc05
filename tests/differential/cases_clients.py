"""Triton's own client library: HTTP, gRPC, streams, asyncio, shared memory."""

from __future__ import annotations

import asyncio
import queue
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as aioclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, shared_memory

from differential.observe import Case
from differential.peers import Peer

FOUR = np.array([1, 2, 3, 4.5], np.float32)


def inputs(library: Any, **arrays: np.ndarray[Any, Any]) -> list[Any]:
    found = []
    for name, array in arrays.items():
        tensor = library.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        found.append(tensor)
    return found


def seen(result: Any, *names: str) -> Any:
    arrays = {name: result.as_numpy(name) for name in names}
    return {name: None if a is None else [str(a.dtype), list(a.shape), a.tolist()] for name, a in arrays.items()}


def failed(error: InferenceServerException) -> Any:
    return {"error": error.message(), "status": error.status()}


def with_http(client: Any) -> Any:
    pair = inputs(httpclient, INPUT0=FOUR, INPUT1=FOUR)
    asked = [httpclient.InferRequestedOutput("OUTPUT0", binary_data=True, class_count=2)]
    texts = inputs(httpclient, INPUT0=np.array(["é", ""], np.object_))
    return [
        seen(client.infer("add_sub", pair, request_id="1"), "OUTPUT0", "OUTPUT1"),
        seen(client.infer("add_sub", pair, outputs=asked), "OUTPUT0"),
        seen(client.infer("strings", texts), "OUTPUT0"),
        seen(client.async_infer("add_sub", pair).get_result(), "OUTPUT0"),
        seen(
            client.infer(
                "add_sub", pair, request_compression_algorithm="gzip", response_compression_algorithm="deflate"
            ),
            "OUTPUT1",
        ),
        client.is_server_live(),
        client.is_model_ready("add_sub"),
        client.is_model_ready("nowhere"),
        client.get_model_metadata("add_sub"),
        client.get_inference_statistics("add_sub")["model_stats"][0].keys() >= {"inference_stats", "batch_stats"},
    ]


def with_grpc(client: Any) -> Any:
    pair = inputs(grpcclient, INPUT0=FOUR, INPUT1=FOUR)
    halves = inputs(grpcclient, IN_FP16=np.array([1.5], np.float16), IN_BOOL=np.array([True]))
    answers: queue.Queue[Any] = queue.Queue()
    client.async_infer("add_sub", pair, lambda result, error: answers.put((result, error)))
    result, error = answers.get(timeout=20)
    return [
        seen(client.infer("add_sub", pair, request_id="1", compression_algorithm="gzip"), "OUTPUT0", "OUTPUT1"),
        seen(client.infer("dtypes", halves), "OUT_FP16", "OUT_BOOL", "OUT_INT8"),
        [seen(result, "OUTPUT0"), error],
        client.get_model_metadata("add_sub", as_json=True),
        client.get_model_config("batched", as_json=True)["config"]["max_batch_size"],
    ]


def with_stream(client: Any) -> Any:
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    found = []
    for n, expected in ((2, 3), (0, 1)):
        arrays = inputs(grpcclient, N=np.array([n], np.int32))
        client.async_stream_infer("repeat", arrays, request_id=str(n), enable_empty_final_response=True)
        for _ in range(expected):
            result, error = answers.get(timeout=20)
            response = result.get_response()
            final = response.parameters["triton_final_response"].bool_param
            found.append([response.id, final, seen(result, "INDEX"), error])
    client.async_stream_infer("repeat", inputs(grpcclient, FAIL_AT=np.array([1], np.int32)), request_id="4")
    found.append(failed(answers.get(timeout=20)[1]))
    client.stop_stream()
    return found


async def with_aio(client: Any) -> Any:
    pair = inputs(grpcclient, INPUT0=FOUR, INPUT1=FOUR)
    results = await asyncio.gather(*(client.infer("add_sub", pair, request_id=str(i)) for i in range(5)))

    async def requests() -> Any:
        for n in (1, 3):
            yield {
                "model_name": "repeat",
                "inputs": inputs(grpcclient, N=np.array([n], np.int32)),
                "request_id": str(n),
            }

    streamed = [(r.get_response().id, seen(r, "INDEX")) async for r, _ in client.stream_infer(requests())]
    return [[seen(result, "OUTPUT0") for result in results], sorted(streamed, key=str)]


def with_shared_memory(library: Any) -> Callable[[Any], Any]:
    """Inputs and one output in the same region; then what a server says of it, and of places outside of it."""

    def run(client: Any) -> Any:
        key = f"/differential_{uuid.uuid4().hex[:12]}"
        region = shared_memory.create_shared_memory_region("region", key, 48)
        try:
            shared_memory.set_shared_memory_region(region, [FOUR, FOUR * 2])
            client.register_system_shared_memory("region", key, 48)
            names = enumerate(("INPUT0", "INPUT1"))
            pair = [library.InferInput(name, [4], "FP32") for _, name in names]
            for index, tensor in enumerate(pair):
                tensor.set_shared_memory("region", 16, offset=16 * index)
            output = library.InferRequestedOutput("OUTPUT0")
            output.set_shared_memory("region", 16, offset=32)
            client.infer("add_sub", pair, outputs=[output])
            found: list[Any] = [shared_memory.get_contents_as_numpy(region, np.float32, [4], 32).tolist()]
            status = client.get_system_shared_memory_status(**({} if library is httpclient else {"as_json": True}))
            found.append(str(status).replace(key, "KEY"))
            found += [_attempt(client, pair, [output], lambda: output.set_shared_memory("region", 8, offset=32))]
            found += [_attempt(client, pair, [output], lambda: output.set_shared_memory("region", 16, offset=40))]
            found += [_attempt(client, pair, [], lambda: pair[0].set_shared_memory("region", 12))]
            found += [_attempt(client, pair, [], lambda: pair[0].set_shared_memory("region", 16, offset=2**40))]
            try:
                client.register_system_shared_memory("region", key, 48)
            except InferenceServerException as error:
                found.append(failed(error))
            client.unregister_system_shared_memory("region")
            found += [_attempt(client, pair, [], lambda: pair[0].set_shared_memory("region", 16))]
            return found
        finally:
            shared_memory.destroy_shared_memory_region(region)

    return run


def _attempt(client: Any, pair: list[Any], outputs: list[Any], change: Callable[[], None]) -> Any:
    change()
    try:
        return seen(client.infer("add_sub", pair, outputs=outputs or None), "OUTPUT1")
    except InferenceServerException as error:
        return failed(error)


def over_http(name: str, use: Callable[[Any], Any]) -> Case:
    def run(peer: Peer) -> Any:
        with httpclient.InferenceServerClient(f"127.0.0.1:{peer.http_port}", network_timeout=30) as client:
            return use(client)

    return Case(f"tritonclient.http: {name}", run)


def over_grpc(name: str, use: Callable[[Any], Any]) -> Case:
    def run(peer: Peer) -> Any:
        with grpcclient.InferenceServerClient(peer.grpc) as client:
            return use(client)

    return Case(f"tritonclient.grpc: {name}", run)


def over_aio(name: str, use: Callable[[Any], Any]) -> Case:
    async def main(peer: Peer) -> Any:
        async with aioclient.InferenceServerClient(peer.grpc) as client:
            return await asyncio.wait_for(use(client), 30)

    return Case(f"tritonclient.grpc.aio: {name}", lambda peer: asyncio.run(main(peer)))


CASES = [
    over_http("infer and the rest", with_http),
    over_grpc("infer and the rest", with_grpc),
    over_grpc("stream", with_stream),
    over_aio("infer and stream", with_aio),
    over_http("shared memory", with_shared_memory(httpclient)),
    over_grpc("shared memory", with_shared_memory(grpcclient)),
]
