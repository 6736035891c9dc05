"""Plain JSON objects to requests, for models that know nothing of JSON.

A key that is the name of an input makes a tensor, any other one a parameter. Rules:
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_generate.md
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from msgspec import Raw
from msgspec.json import encode as encode_json

from penstock.classic.messages import InferRequest
from penstock.classic.signature import ModelSignature, TensorSignature
from penstock.classic.tensors import Tensor
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.front.bounded_json import decode_checked, decode_json, has_all_members
from penstock.gateway.kserve.infer_json import from_json
from penstock.gateway.kserve.parameters import MAX_MEMBERS, take_parameters
from penstock.gateway.kserve.parameters import from_json as parameter_from_json

_NESTED = "parameters"
_ID = "id"
_BLANK = b"[] \t\r\n"

_Fields = Mapping[str, Raw]
"""Values are decoded when it is known what they are, so that long arrays never become Python lists as a whole."""


def read_generate(body: bytes, signature: ModelSignature) -> InferRequest:
    """Raises InvalidRequestError."""
    fields = decode_json(body, dict[str, Raw], most_members=MAX_MEMBERS)
    _check_keys(body, fields, signature)
    request = InferRequest(inputs={})
    nested = fields.pop(_NESTED, None)
    if _ID in fields:
        request.id = _id(fields.pop(_ID))
    parameters = _taken(request, fields, signature)
    if nested is not None:
        parameters |= _taken(request, _nested(nested, signature), signature)
    take_parameters(request, parameters)
    return request


def _taken(request: InferRequest, fields: _Fields, signature: ModelSignature) -> dict[str, object]:
    """Gives the request its tensors; returns the parameters."""
    parameters: dict[str, object] = {}
    for name, value in fields.items():
        tensor = signature.inputs.get(name)
        if tensor is None:
            parameters[name] = parameter_from_json(value)
        elif name in request.inputs:
            raise InvalidRequestError(f"input '{name}' already exists in request")
        else:
            request.inputs[name] = _tensor(tensor, bytes(value), signature.batched)
    return parameters


def _nested(value: Raw, signature: ModelSignature) -> _Fields:
    if _NESTED in signature.inputs:
        raise InvalidRequestError(f"Keyword '{_NESTED}' for nested schema also given as input tensor name")
    if bytes(value)[:1] != b"{":
        raise InvalidRequestError(f"Expected JSON object for keyword: '{_NESTED}'")
    fields = decode_checked(bytes(value), dict[str, Raw])
    _check_keys(bytes(value), fields, signature)
    return fields


def _check_keys(text: bytes, fields: _Fields, signature: ModelSignature) -> None:
    """Raises InvalidRequestError, for an input in Triton's words, where a key stands twice in an object: one of the two
    would be lost."""
    if has_all_members(text, len(fields)):
        return
    again: dict[int, str] = {}
    """By the place where the input stands for the second time: Triton names the first of those."""
    for name in signature.inputs.keys() & fields.keys():
        places = [found.start() for found in re.finditer(re.escape(encode_json(name)) + rb"\s*:", text)]
        if len(places) > 1:
            again[places[1]] = name
    if again:
        raise InvalidRequestError(f"input '{again[min(again)]}' already exists in request")
    raise InvalidRequestError("a key stands more than once in the request")


def _id(value: Raw) -> str:
    if bytes(value)[:1] != b'"':
        raise InvalidRequestError(f"Unable to parse '{_ID}': it must be a string")
    return decode_checked(bytes(value), str)


def _tensor(signature: TensorSignature, text: bytes, batched: bool) -> Tensor:
    """A scalar or an array in the shape that it must have. How an array is nested is not looked at, as in Triton."""
    if text[:1] != b"[":
        text = b"[" + text + b"]"
    shape = _shape(signature, _count(signature.datatype, text), batched)
    return from_json(signature.name, signature.datatype, shape, Raw(text))


def _count(datatype: str, text: bytes) -> int:
    """Elements of an array, if those are what the datatype asks for; decoding finds out."""
    if datatype == "BYTES":
        return text.replace(b"\\\\", b"").replace(b'\\"', b"").count(b'"') // 2
    return text.count(b",") + 1 if text.translate(None, _BLANK) else 0


def _shape(signature: TensorSignature, count: int, batched: bool) -> tuple[int, ...]:
    """The innermost variable dimension takes what the fixed ones leave of the elements; the others are 1."""
    dims = [-1, *signature.dims] if batched else list(signature.dims)
    fixed = math.prod(dim for dim in dims if dim >= 0)
    variable = [index for index, dim in enumerate(dims) if dim < 0]
    if count % fixed if fixed and variable else count != fixed:
        raise InvalidRequestError(f"The schema can not convert input '{signature.name}' to tensor with proper shape")
    shape = [max(dim, 1) if dim < 0 else dim for dim in dims]
    if variable and fixed:
        shape[variable[-1]] = count // fixed
    return tuple(shape)
