"""KServe v2 inference over HTTP, with tensors as JSON or in Triton's binary form."""

from __future__ import annotations

import math
from typing import Any
from urllib.parse import quote

import msgspec

from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.clients.http_client import HttpClient, encode, merged
from penstock.loadtest.clients.kserve_model import model_metadata
from penstock.loadtest.clients.response import HttpResponse
from penstock.loadtest.clients.tensors import SIZES, Tensor, random_tensors
from penstock.loadtest.messages import Answer, Call

_HEADER = "Inference-Header-Content-Length"


class _Parameters(msgspec.Struct):
    binary_data_size: int | None = None


class _Output(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    data: msgspec.Raw = msgspec.Raw()
    """Not decoded."""
    parameters: _Parameters | None = None


class _Body(msgspec.Struct):
    outputs: list[_Output]


_decode = msgspec.json.Decoder(_Body).decode


class InferClient(HttpClient):
    """`/v2/models/M/infer`. One request is made when the client is opened, and sent again and again: what making
    tensors costs is not part of what is measured, and a server that caches answers would have it easy."""

    def __init__(self, options: ClientOptions, *, binary: bool) -> None:
        super().__init__(options)
        self._binary = binary
        self._request = b""

    async def open(self) -> None:
        options = self.options
        metadata = None if options.input_tensor and options.model else await model_metadata(options)
        self._request = self._request_of(random_tensors(options, metadata))

    def _request_of(self, tensors: list[Tensor]) -> bytes:
        path = f"/v2/models/{quote(self.options.model, safe='')}/infer"
        inputs: list[dict[str, Any]] = []
        data: list[bytes] = []
        for tensor in tensors:
            inputs.append({"name": tensor.name, "shape": tensor.shape, "datatype": tensor.datatype})
            if self._binary:
                data.append(tensor.raw())
                inputs[-1]["parameters"] = {"binary_data_size": len(data[-1])}
            else:
                inputs[-1]["data"] = tensor.json()
        body: dict[str, Any] = {"inputs": inputs}
        if not self._binary:
            return self.post(self.head(path), encode(merged(body, self.options.extra)))
        body["parameters"] = {"binary_data_output": True}
        text = encode(merged(body, self.options.extra))
        head = self.head(path, kind="application/octet-stream", **{_HEADER: str(len(text))})
        return self.post(head, b"".join([text, *data]))

    def request(self, call: Call) -> bytes:
        return self._request

    def read(self, response: HttpResponse, answer: Answer) -> None:
        answer.output_tokens = 0
        header = response.field(_HEADER)
        size = int(header) if header is not None else len(response.body)
        outputs = _decode(response.body[:size]).outputs
        if not outputs:
            raise ValueError("an answer without outputs")
        missing = sum(_binary_size(output) for output in outputs) - (len(response.body) - size)
        if missing:
            raise ValueError(f"the answer's binary data are {missing} bytes short")


def _binary_size(output: _Output) -> int:
    """Bytes that follow the JSON. Raises ValueError for an output that lacks elements."""
    elements = math.prod(output.shape)
    item = SIZES.get(output.datatype)
    binary = output.parameters.binary_data_size if output.parameters is not None else None
    if binary is not None:
        size = elements if item is None or binary == item * elements else -1
    elif item is None:
        size = elements if bytes(output.data).startswith(b"[") else -1
    else:  # however arrays are nested, there is a comma between two elements
        data = bytes(output.data)
        size = data.count(b",") + 1 if data.strip(b"[] \n\r\t") else 0
    if size != elements:
        raise ValueError(f"output {output.name} has not as many elements as its shape {output.shape} says")
    return binary or 0
