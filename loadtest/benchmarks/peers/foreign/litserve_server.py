"""LitServe, whose API is its own: paths and JSON are made to look like KServe v2. `litserve_server.py PORT`"""

from __future__ import annotations

import sys
from typing import Any

import litserve
import numpy as np


class _Tensors(litserve.LitAPI):
    def setup(self, device: str) -> None:
        """Nothing to load."""

    # LitServe reads annotations of the next two as forms of requests and answers; without any, JSON is decoded.
    def decode_request(self, request):  # type: ignore[no-untyped-def]
        return [np.asarray(tensor["data"], np.float32).reshape(tensor["shape"]) for tensor in request["inputs"]]

    def encode_response(self, output):  # type: ignore[no-untyped-def]
        tensors = [
            {"name": f"OUTPUT{index}", "datatype": "FP32", "shape": list(array.shape), "data": array.ravel().tolist()}
            for index, array in enumerate(output)
        ]
        return {"outputs": tensors}


class AddSub(_Tensors):
    def predict(self, x: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        left, right = x
        return [left + right, left - right]


class Identity(_Tensors):
    def predict(self, x: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        return x


if __name__ == "__main__":
    models = {"add_sub": AddSub, "identity": Identity}
    apis = [api(api_path=f"/v2/models/{name}/infer") for name, api in models.items()]
    server = litserve.LitServer(apis, accelerator="cpu", workers_per_device=1)
    server.run(
        host="127.0.0.1", port=int(sys.argv[1]), num_api_servers=1, log_level="error", generate_client_file=False
    )
