"""Tensors as KServe's gRPC form carries them, in `raw_input_contents` and `raw_output_contents`."""

from __future__ import annotations

from functools import partial

from benchmarks.micro.benchmark import Benchmark, Work
from benchmarks.micro.suite.kserve_http import SIZES


def _message(kind: str) -> bytes:
    from tritonclient.grpc.service_pb2 import ModelInferRequest

    from benchmarks.micro.suite.tensors import tensors
    from penstock.classic.tensors import to_buffer

    message = ModelInferRequest(model_name=kind, id="1")
    for tensor in tensors(kind, "INPUT"):
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.array.shape)
        message.raw_input_contents.append(to_buffer(tensor))
    return bytes(message.SerializeToString())


def _decode(kind: str) -> Work:
    from benchmarks.micro.suite.tensors import model
    from penstock.gateway.apis.kserve.grpc.messages import decode, parse
    from penstock.gateway.apis.kserve.shared_memory import SharedMemoryRegions

    data, served, regions = _message(kind), model(kind), SharedMemoryRegions(allowed=False)

    def run() -> None:
        decode(parse(data), served, regions)

    return Work(run)


def _decode_known(kind: str) -> Work:
    from benchmarks.micro.suite.tensors import model
    from penstock.gateway.apis.kserve.grpc.messages import decode, parse
    from penstock.gateway.apis.kserve.grpc.request_forms import RequestForms
    from penstock.gateway.apis.kserve.shared_memory import SharedMemoryRegions

    data, forms = _message(kind), RequestForms()
    message = parse(data)
    forms.learn(data, message, decode(message, model(kind), SharedMemoryRegions(allowed=False)).request)

    def run() -> None:
        known = forms.known(data)
        assert known is not None
        known.request()

    return Work(run)


def _encode(kind: str) -> Work:
    from benchmarks.micro.suite.tensors import response
    from penstock.gateway.apis.kserve.grpc.messages import ResponseEncoder, ResponseForms

    outputs, forms = response(kind).outputs or [], ResponseForms()

    def run() -> None:
        ResponseEncoder(forms, kind, 1, "1").encode(outputs)

    return Work(run)


BENCHMARKS = (
    *(
        Benchmark(f"kserve-grpc/decode-{kind}", f"request of {size}", partial(_decode, kind))
        for kind, size in SIZES.items()
    ),
    *(
        Benchmark(f"kserve-grpc/decode-known-{kind}", f"request of {size}", partial(_decode_known, kind))
        for kind, size in SIZES.items()
    ),
    *(
        Benchmark(f"kserve-grpc/encode-{kind}", f"response of {size}", partial(_encode, kind))
        for kind, size in SIZES.items()
    ),
)
