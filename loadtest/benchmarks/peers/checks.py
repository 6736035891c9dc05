"""A check of a server's tensors, made once before it is measured: a wrong answer can be very quick."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import Target

Arrays = dict[str, npt.NDArray[np.float32]]
_HEADER = "Inference-Header-Content-Length"
_LONGEST = 300


def check_tensors(target: Target) -> None:
    """Raises LoadTestError for an answer that is not the model's."""
    inputs = _inputs(target)
    try:
        outputs = _infer_grpc(target, inputs) if target.protocol == "kserve-grpc" else _infer_http(target, inputs)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise LoadTestError(f"{target.model} over {target.protocol}: {type(error).__name__}: {error}") from None
    for name, expected in _expected(target.model, inputs).items():
        array = outputs.get(name)
        if array is None or array.shape != expected.shape or not np.allclose(array, expected, atol=1e-5):
            raise LoadTestError(f"{target.model} over {target.protocol}: its output {name} is wrong")


def _inputs(target: Target) -> Arrays:
    rng = np.random.default_rng(0)
    arrays: Arrays = {}
    for text in target.input_tensor:
        name, _, dims = text.split(":")
        arrays[name] = rng.random([int(dim) for dim in dims.split(",")], np.float32)
    return arrays


def _expected(model: str, inputs: Arrays) -> Arrays:
    if model == "identity":
        return {"OUTPUT0": inputs["INPUT0"]}
    left, right = inputs["INPUT0"], inputs["INPUT1"]
    return {"OUTPUT0": left + right, "OUTPUT1": left - right}


def _infer_http(target: Target, inputs: Arrays) -> Arrays:
    """As JSON or with binary data, as the protocol says; an answer in either form is read."""
    binary = target.protocol == "kserve-http-binary"
    tensors: list[dict[str, Any]] = []
    for name, array in inputs.items():
        form: dict[str, Any] = (
            {"parameters": {"binary_data_size": array.nbytes}} if binary else {"data": array.ravel().tolist()}
        )
        tensors.append({"name": name, "datatype": "FP32", "shape": list(array.shape)} | form)
    body: dict[str, Any] = {"inputs": tensors} | ({"parameters": {"binary_data_output": True}} if binary else {})
    text = json.dumps(body).encode()
    headers = {"Content-Type": "application/octet-stream" if binary else "application/json"}
    if binary:
        headers[_HEADER] = str(len(text))
        text += b"".join(array.tobytes() for array in inputs.values())
    request = urllib.request.Request(f"{target.url}/v2/models/{target.model}/infer", text, headers)
    try:
        with urllib.request.urlopen(request, timeout=target.request_timeout) as answer:
            data, size = answer.read(), answer.headers.get(_HEADER)
    except urllib.error.HTTPError as error:
        raise ValueError(f"status {error.code}: {error.read()[:_LONGEST].decode(errors='replace')}") from None
    return _outputs(data, len(data) if size is None else int(size))


def _outputs(data: bytes, size: int) -> Arrays:
    """Of an answer whose JSON has so many bytes; binary data follow it."""
    arrays: Arrays = {}
    for output in json.loads(data[:size])["outputs"]:
        length = (output.get("parameters") or {}).get("binary_data_size")
        if length is None:
            flat = np.asarray(output["data"], np.float32)
        else:
            flat, size = np.frombuffer(data[size : size + length], "<f4"), size + length
        arrays[output["name"]] = flat.reshape(output["shape"])
    return arrays


def _infer_grpc(target: Target, inputs: Arrays) -> Arrays:
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    request = service_pb2.ModelInferRequest(model_name=target.model)
    for name, array in inputs.items():
        request.inputs.add(name=name, datatype="FP32", shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    with grpc.insecure_channel(target.url.rpartition("/")[2]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            answer = stub.ModelInfer(request, timeout=target.request_timeout, wait_for_ready=True)
        except grpc.RpcError as error:
            raise ValueError(f"{error.code().name}: {error.details()}") from None
    arrays: Arrays = {}
    for index, output in enumerate(answer.outputs):
        if answer.raw_output_contents:
            flat = np.frombuffer(answer.raw_output_contents[index], "<f4")
        else:
            flat = np.asarray(output.contents.fp32_contents, np.float32)
        if flat.size == math.prod(output.shape):
            arrays[output.name] = flat.reshape(list(output.shape))
    return arrays
