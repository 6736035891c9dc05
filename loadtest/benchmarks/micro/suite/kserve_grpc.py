"""Tensors as KServe's gRPC form carries them, in `raw_input_contents` and `raw_output_contents`."""

from __future__ import annotations

from functools import partial

from benchmarks.micro.benchmark import Benchmark, Work
from benchmarks.micro.suite.kserve_http import SIZES


def _decode(kind: str) -> Work:
    from tritonclient.grpc.service_pb2 import ModelInferRequest

    from benchmarks.micro.suite.tensors import model, tensors
    from penstock.classic.tensors import to_buffer
    from penstock.gateway.kserve.grpc.decode import decode, parse
    from penstock.gateway.kserve.shared_memory import SharedMemoryRegions

    message = ModelInferRequest(model_name=kind, id="1")
    for tensor in tensors(kind, "INPUT"):
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.array.shape)
        message.raw_input_contents.append(to_buffer(tensor))
    data, served, regions = message.SerializeToString(), model(kind), SharedMemoryRegions(allowed=False)

    def run() -> None:
        decode(parse(data), served, regions)

    return Work(run)


def _encode(kind: str) -> Work:
    from tritonclient.grpc.service_pb2 import ModelInferResponse

    from benchmarks.micro.suite.tensors import response
    from penstock.gateway.kserve.grpc.encode import fill_response

    answer = response(kind)
    outputs = answer.outputs or []

    def run() -> None:
        message = ModelInferResponse(model_name=kind, model_version="1", id="1")
        fill_response(message, answer, outputs, None)
        message.SerializeToString()

    return Work(run)


BENCHMARKS = (
    *(
        Benchmark(f"kserve-grpc/decode-{kind}", f"request of {size}", partial(_decode, kind))
        for kind, size in SIZES.items()
    ),
    *(
        Benchmark(f"kserve-grpc/encode-{kind}", f"response of {size}", partial(_encode, kind))
        for kind, size in SIZES.items()
    ),
)
