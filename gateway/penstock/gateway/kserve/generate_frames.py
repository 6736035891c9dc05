"""Responses as flat JSON objects with sorted keys, alone or as server-sent events.

Nearly all of a stream's frames is the same from response to response, so it is rendered once for each set of outputs
and only the tensors' JSON is spliced in.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.tensors import Tensor
from penstock.gateway.kserve.errors import kserve_error_body
from penstock.gateway.kserve.infer_json import to_json

_encode = msgspec.json.Encoder().encode
_DATA = b"data: "
_END = b"\n\n"
_HALF = ("FP16", "BF16")


class Renderer:
    """Renders the responses of one request to a model."""

    def __init__(self, model: str, version: int, request: InferRequest) -> None:
        self._head = {"model_name": _encode(model), "model_version": _encode(str(version))}
        if request.id:
            self._head["id"] = _encode(request.id)
        self._names: tuple[str, ...] | None = None
        self._layout: list[tuple[bytes, int | None]] = []
        """For each key that holds a tensor: what stands before its value, and which tensor of the response it is. The
        last one is what ends the object."""

    def body(self, response: InferResponse) -> bytes:
        """The response as an object."""
        return b"{" + self._fields(response) + b"}"

    def frames(self, responses: Iterable[InferResponse]) -> bytes:
        """The responses as events; those that are nothing but the final flag give none."""
        parts: list[bytes] = []
        for response in responses:
            if response.error is not None:
                parts.append(error_frame(response.error))
            elif response.outputs is not None:
                parts += (_DATA, b"{", self._fields(response), b"}", _END)
        return b"".join(parts)

    def _fields(self, response: InferResponse) -> bytes:
        outputs = response.outputs or []
        if response.parameters:
            values = {tensor.name: _json(tensor) for tensor in outputs}
            values |= {name: _encode(value) for name, value in response.parameters.items()}
            return _object(self._head | values)
        names = tuple([tensor.name for tensor in outputs])
        if names != self._names:
            self._lay_out(names)
        parts: list[bytes] = []
        for before, index in self._layout:
            parts.append(before)
            if index is not None:
                parts.append(_json(outputs[index]))
        return b"".join(parts)

    def _lay_out(self, names: tuple[str, ...]) -> None:
        values: dict[str, bytes | int] = {**self._head, **{name: index for index, name in enumerate(names)}}
        layout: list[tuple[bytes, int | None]] = []
        before = b""
        for name in sorted(values):
            before += (b"," if before or layout else b"") + _encode(name) + b":"
            value = values[name]
            if isinstance(value, int):
                layout.append((before, value))
                before = b""
            else:
                before += value
        self._layout = [*layout, (before, None)]
        self._names = names


def error_frame(error: Exception) -> bytes:
    """The error as an event. Triton's own says `An Error Occurred` or what the model said."""
    return _DATA + kserve_error_body(error) + _END


def _object(values: dict[str, bytes]) -> bytes:
    return b",".join([_encode(name) + b":" + values[name] for name in sorted(values)])


def _json(tensor: Tensor) -> bytes:
    """One element as a scalar, more of them or none as a flat array. NaN and infinities, which JSON lacks, are null;
    bytes that are no UTF-8 text are replaced: this front has no binary form to refer to."""
    array = tensor.array
    if tensor.datatype == "BYTES":
        texts = [item.decode(errors="replace") if isinstance(item, bytes) else str(item) for item in array.flat]
        return _encode(texts[0] if len(texts) == 1 else texts)
    if array.size != 1:
        return _encode(to_json(tensor))
    value = array.item()
    return _encode(float(value) if tensor.datatype in _HALF else value)
