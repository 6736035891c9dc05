"""Wrong tensors are noticed, in both of HTTP's forms."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from benchmarks.peers.checks import check_tensors
from benchmarks.peers.plan import TENSORS
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import Target

HEADER = "Inference-Header-Content-Length"
Model = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@contextmanager
def serving(model: Model, *, binary: bool = False, parameters: object = None) -> Iterator[str]:
    """A KServe server of one model; `parameters` are those of each output in JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            size = int(self.headers.get(HEADER, len(data)))
            arrays = []
            for tensor in json.loads(data[:size])["inputs"]:
                if binary:
                    length = tensor["parameters"]["binary_data_size"]
                    flat, size = np.frombuffer(data[size : size + length], "<f4"), size + length
                else:
                    flat = np.asarray(tensor["data"], "<f4")
                arrays.append(flat.reshape(tensor["shape"]))
            outputs, tail = [], b""
            for index, array in enumerate(model(*arrays)):
                output = {"name": f"OUTPUT{index}", "datatype": "FP32", "shape": array.shape, "parameters": parameters}
                if binary:
                    tail += array.tobytes()
                    outputs.append(output | {"parameters": {"binary_data_size": array.nbytes}})
                else:
                    outputs.append(output | {"data": array.ravel().tolist()})
            head = json.dumps({"outputs": outputs}).encode()
            self.send_response(200)
            if binary:
                self.send_header(HEADER, str(len(head)))
            self.end_headers()
            self.wfile.write(head + tail)

        def log_message(self, *args: object) -> None:
            """Not to the tests' output."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def add_sub(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return left + right, left - right


def target(url: str, protocol: str = "kserve-http") -> Target:
    return Target(url=url, model="add_sub", protocol=protocol, input_tensor=TENSORS["add_sub"], request_timeout=10)


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("parameters", [None, {}])
def test_right_tensors(binary: bool, parameters: object) -> None:
    with serving(add_sub, binary=binary, parameters=parameters) as url:
        check_tensors(target(url, "kserve-http-binary" if binary else "kserve-http"))


@pytest.mark.parametrize("binary", [False, True])
def test_wrong_tensors(binary: bool) -> None:
    with (
        serving(lambda left, right: (left + right, right - left), binary=binary) as url,
        pytest.raises(LoadTestError, match="its output OUTPUT1 is wrong"),
    ):
        check_tensors(target(url, "kserve-http-binary" if binary else "kserve-http"))


def test_wrong_shapes_and_missing_outputs() -> None:
    with serving(lambda left, right: (left.ravel(), right)) as url, pytest.raises(LoadTestError, match="OUTPUT0"):
        check_tensors(target(url))
    with serving(lambda left, right: (left + right,)) as url, pytest.raises(LoadTestError, match="OUTPUT1"):  # type: ignore[arg-type, return-value]
        check_tensors(target(url))


def test_nobody_there() -> None:
    with pytest.raises(LoadTestError, match="add_sub over kserve-http: URLError"):
        check_tensors(target("http://127.0.0.1:9"))
