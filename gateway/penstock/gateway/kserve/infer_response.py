"""An inference response as HTTP carries it: a JSON header, and behind it binary tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from penstock.classic.base import InferModel
from penstock.classic.messages import Parameter
from penstock.classic.tensors import Tensor, to_buffer
from penstock.gateway.kserve.infer_json import to_json
from penstock.gateway.kserve.infer_request import Inference

_encode = msgspec.json.Encoder().encode


class _Output(Struct, omit_defaults=True):
    name: str
    datatype: str
    shape: Sequence[int]
    parameters: dict[str, int] | UnsetType = UNSET
    data: list[Any] | Raw | UnsetType = UNSET


class _Head(Struct, omit_defaults=True, kw_only=True):
    id: str = ""
    model_name: str
    model_version: str
    parameters: dict[str, Parameter] = {}
    outputs: list[_Output]


def encode_infer(
    inference: Inference, model: InferModel, tensors: Iterable[Tensor], parameters: dict[str, Parameter]
) -> list[bytes]:
    """The JSON header and the binary outputs, in order. `tensors` and `parameters` are those of the response.

    Outputs that go to shared memory are written there. Raises InvalidRequestError for what cannot be sent as asked.
    """
    parts = [b""]
    outputs = []
    forms = inference.forms
    for tensor in tensors:
        form = forms.get(tensor.name) if forms else None
        if form is not None and form.memory is not None:
            form.memory.write(to_buffer(tensor))
            outputs.append(_Output(tensor.name, tensor.datatype, tensor.array.shape))
        else:
            outputs.append(_output(tensor, inference.binary if form is None else form.binary, parts))
    parts[0] = _encode(
        _Head(
            id=inference.request.id,
            model_name=model.name,
            model_version=str(model.version),
            parameters=parameters,
            outputs=outputs,
        )
    )
    return parts


def _output(tensor: Tensor, binary: bool, parts: list[bytes]) -> _Output:
    if not binary:
        return _Output(tensor.name, tensor.datatype, tensor.array.shape, UNSET, to_json(tensor))
    data = to_buffer(tensor)
    parts.append(data)
    return _Output(tensor.name, tensor.datatype, tensor.array.shape, {"binary_data_size": len(data)})
