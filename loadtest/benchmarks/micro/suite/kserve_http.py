"""Tensors as KServe's HTTP form carries them: JSON, and binary behind a JSON header."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.micro.benchmark import Benchmark, Work

if TYPE_CHECKING:
    from penstock.classic.tensors import Tensor

SIZES = {"add_sub": "2 x 16 floats", "image": "3 x 224 x 224 floats"}
"""Of the models in `tensors`."""


def _decode(kind: str, *, binary: bool) -> Work:
    from benchmarks.micro.suite.tensors import model, tensors
    from penstock.gateway.apis.kserve.http_infer import parse_infer
    from penstock.gateway.apis.kserve.shared_memory import SharedMemoryRegions

    inputs, served = tensors(kind, "INPUT"), model(kind)
    head, tail = _request(inputs, binary=binary)
    body, length = head + tail, len(head) if binary else None
    regions = SharedMemoryRegions(allowed=False)

    def run() -> None:
        parse_infer(body, length, served, regions)

    return Work(run)


def _encode(kind: str, *, binary: bool) -> Work:
    from benchmarks.micro.suite.tensors import model, response
    from penstock.classic.messages import InferRequest
    from penstock.gateway.apis.kserve.http_infer import encode_infer
    from penstock.gateway.apis.kserve.infer_heads import Inference

    answer, served = response(kind), model(kind)
    inference = Inference(InferRequest(inputs={}), binary=binary)

    def run() -> None:
        encode_infer(inference, served, answer.outputs or (), {})

    return Work(run)


def _request(values: list[Tensor], *, binary: bool) -> tuple[bytes, bytes]:
    """(JSON, what follows it)."""
    import msgspec

    from penstock.classic.tensors import to_buffer

    inputs, data = [], []
    for tensor in values:
        entry: dict[str, Any] = {"name": tensor.name, "shape": tensor.array.shape, "datatype": tensor.datatype}
        if binary:
            data.append(to_buffer(tensor))
            entry["parameters"] = {"binary_data_size": len(data[-1])}
        else:
            entry["data"] = tensor.array.ravel().tolist()
        inputs.append(entry)
    head = msgspec.json.encode({"inputs": inputs})
    if binary:  # elements begin at an odd place, as they mostly do behind JSON: the decoder has to copy them
        head += b" " * (-len(head) % 4 + 1)
    return head, b"".join(data)


def _benchmark(what: str, kind: str, form: str) -> Benchmark:
    setup = partial(_decode if what == "decode" else _encode, kind, binary=form == "binary")
    noun = "request" if what == "decode" else "response"
    return Benchmark(f"kserve-{form}/{what}-{kind}", f"{noun} of {SIZES[kind]}", setup)


BENCHMARKS = tuple(
    _benchmark(what, kind, form) for form in ("json", "binary") for kind in SIZES for what in ("decode", "encode")
)
