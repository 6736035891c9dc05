"""Plain JSON objects to requests, for models that know nothing of JSON.

A key that is the name of an input makes a tensor, any other one a parameter. Rules:
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_generate.md
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.engines.classic.messages import InferRequest
from penstock.engines.classic.signature import ModelSignature, TensorSignature
from penstock.engines.classic.tensors import Array, Tensor
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.kserve.parameters import take_parameters

_NESTED = "parameters"
_ID = "id"
_INTEGERS: dict[np.dtype[Any], Any] = {
    np.dtype(kind): np.iinfo(kind) for kind in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8")
}


def read_generate(body: Mapping[str, Any], signature: ModelSignature) -> InferRequest:
    """Raises InvalidRequestError."""
    request = InferRequest(inputs={})
    parameters: dict[str, object] = {}
    for name, value in body.items():
        if name == _NESTED:
            _take(request, parameters, _nested(value, signature), signature)
        elif name == _ID:
            request.id = _id(value)
        else:
            _take(request, parameters, {name: value}, signature)
    take_parameters(request, parameters)
    return request


def _take(
    request: InferRequest, parameters: dict[str, object], fields: Mapping[str, Any], signature: ModelSignature
) -> None:
    for name, value in fields.items():
        tensor = signature.inputs.get(name)
        if tensor is None:
            parameters[name] = value
        elif name in request.inputs:
            raise InvalidRequestError(f"input '{name}' already exists in request")
        else:
            request.inputs[name] = _tensor(tensor, value, signature.batched)


def _nested(value: object, signature: ModelSignature) -> Mapping[str, Any]:
    if _NESTED in signature.inputs:
        raise InvalidRequestError(f"Keyword '{_NESTED}' for nested schema also given as input tensor name")
    if not isinstance(value, dict):
        raise InvalidRequestError(f"Expected JSON object for keyword: '{_NESTED}'")
    return value


def _id(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"Unable to parse '{_ID}': it must be a string")
    return value


def _tensor(signature: TensorSignature, value: object, batched: bool) -> Tensor:
    """A scalar or a flat array in the shape that it must have."""
    values = value if isinstance(value, list) else [value]
    shape = _shape(signature, len(values), batched)
    return Tensor(signature.name, signature.datatype, _array(signature, values).reshape(shape))


def _shape(signature: TensorSignature, count: int, batched: bool) -> list[int]:
    """The innermost variable dimension takes what the fixed ones leave of the elements; the others are 1."""
    dims = [-1, *signature.dims] if batched else list(signature.dims)
    fixed = math.prod(dim for dim in dims if dim >= 0)
    variable = [index for index, dim in enumerate(dims) if dim < 0]
    if count % fixed if fixed and variable else count != fixed:
        raise InvalidRequestError(f"The schema can not convert input '{signature.name}' to tensor with proper shape")
    shape = [max(dim, 1) if dim < 0 else dim for dim in dims]
    if variable and fixed:
        shape[variable[-1]] = count // fixed
    return shape


def _array(signature: TensorSignature, values: Sequence[Any]) -> Array:
    kinds = set(map(type, values))
    if signature.datatype == "BYTES":
        _check(signature, kinds <= {str}, "a string")
        array = np.empty(len(values), np.object_)
        array[:] = [value.encode() for value in values]
        return array
    if signature.datatype == "BOOL":
        _check(signature, kinds <= {bool}, "a boolean")
    elif signature.dtype in _INTEGERS:
        _check(signature, kinds <= {int}, "an integer")
        bounds = _INTEGERS[signature.dtype]
        _check(signature, not values or (bounds.min <= min(values) and max(values) <= bounds.max), "in its range")
    else:
        return _floats(signature, values, kinds)
    return np.array(values, signature.dtype)


def _floats(signature: TensorSignature, values: Sequence[Any], kinds: set[type]) -> Array:
    _check(signature, kinds <= {int, float}, "a number")
    try:
        with np.errstate(over="ignore"):
            array = np.array(values, np.float64).astype(signature.dtype)
        finite = bool(np.isfinite(array).all())
    except OverflowError:  # an integer beyond every float
        finite = False
    _check(signature, finite, "in its range")
    return array


def _check(signature: TensorSignature, fine: bool, words: str) -> None:
    if not fine:
        raise InvalidRequestError(f"each element of input '{signature.name}' must be {words} ({signature.datatype})")
