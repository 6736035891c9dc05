"""An inference response as HTTP carries it: a JSON header, and behind it binary tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from penstock.classic.base import InferModel
from penstock.classic.messages import InferResponse
from penstock.classic.tensors import Tensor, to_buffer
from penstock.gateway.kserve.classification import classified
from penstock.gateway.kserve.infer_json import to_json
from penstock.gateway.kserve.infer_request import Inference, OutputForm

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
    parameters: dict[str, Any] = {}
    outputs: list[_Output]


def encode_infer(
    inference: Inference, model: InferModel, response: InferResponse, labels: Mapping[str, Sequence[str]]
) -> list[bytes]:
    """The JSON header and the binary outputs, in order. `labels` are those of the outputs that are classified.

    Outputs that go to shared memory are written there. Raises InvalidRequestError for what cannot be sent as asked.
    """
    parts = [b""]
    outputs = []
    forms = inference.forms
    for tensor in response.outputs or ():
        form = forms.get(tensor.name) if forms else None
        if form is None:
            outputs.append(_output(tensor, inference.binary, parts))
        else:
            outputs.append(_formed(tensor, form, model, labels, parts))
    parts[0] = _encode(
        _Head(
            id=inference.request.id,
            model_name=model.name,
            model_version=str(model.version),
            parameters=response.parameters,
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


def _formed(
    tensor: Tensor, form: OutputForm, model: InferModel, labels: Mapping[str, Sequence[str]], parts: list[bytes]
) -> _Output:
    if form.memory is not None:
        form.memory.write(to_buffer(tensor))
        return _Output(tensor.name, tensor.datatype, tensor.array.shape)
    if form.classes:
        batched = model.config.max_batch_size > 0
        tensor = classified(tensor, form.classes, batched=batched, labels=labels.get(tensor.name, ()))
    return _output(tensor, form.binary, parts)
