"""KServe's SDK: add_sub and identity in one process, with the flags of its ModelServer."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer
from kserve.utils.utils import generate_uuid

logging.disable(logging.INFO)  # a line for each request


class _Ready(Model):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.ready = True

    def answer(self, payload: InferRequest, arrays: dict[str, np.ndarray[Any, Any]]) -> InferResponse:
        """In binary when the request asks for it, as gRPC always does."""
        binary = bool(payload.from_grpc or payload.use_binary_outputs)
        outputs = []
        for name, array in arrays.items():
            output = InferOutput(name, list(array.shape), "FP32")
            output.set_data_from_numpy(array, binary_data=binary)
            outputs.append(output)
        flags = {} if payload.from_grpc else {"use_binary_outputs": binary}
        return InferResponse(payload.id or generate_uuid(), self.name, outputs, **flags)


class AddSub(_Ready):
    async def predict(self, payload: InferRequest, headers: Any = None, response_headers: Any = None) -> InferResponse:
        inputs = {tensor.name: tensor.as_numpy() for tensor in payload.inputs}
        left, right = inputs["INPUT0"], inputs["INPUT1"]
        return self.answer(payload, {"OUTPUT0": left + right, "OUTPUT1": left - right})


class Identity(_Ready):
    async def predict(self, payload: InferRequest, headers: Any = None, response_headers: Any = None) -> InferResponse:
        return self.answer(payload, {"OUTPUT0": payload.inputs[0].as_numpy()})


if __name__ == "__main__":
    server = ModelServer(enable_latency_logging=False, workers=1, enable_docs_url=False)
    server.start([AddSub("add_sub"), Identity("identity")])
