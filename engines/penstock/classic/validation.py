"""Is this request one that the model can be asked? The checks and texts of Triton's server.

Clients match on these texts, so they are Triton's, the order of the checks too.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.classic.messages import InferRequest
from penstock.classic.signature import ModelSignature, TensorSignature
from penstock.classic.tensors import Tensor
from penstock.engines.errors import InvalidRequestError

_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


def check_request(request: InferRequest, signature: ModelSignature) -> int:
    """The batch size: the first dimension of the inputs, at least 1; 0 for a model without batching.

    Raises InvalidRequestError.
    """
    # Nearly all requests are right, and most models have fixed shapes: those are told in one pass over the inputs.
    # Whatever that pass does not understand goes through the checks in full.
    inputs = request.inputs
    if signature.uniform and not request.outputs and len(inputs) == len(signature.inputs):
        size = _uniform_size(inputs, signature)
        if size >= 0:
            return size
    return _checked_size(request, signature)


def request_prefix(request: InferRequest) -> str:
    """What stands before Triton's error texts."""
    return f"[request id: {request.id or '<id_unknown>'}] "


def _uniform_size(inputs: dict[str, Tensor], signature: ModelSignature) -> int:
    """The batch size of a valid request to a model with fixed shapes and no optional inputs, else -1."""
    expected = signature.inputs
    size = -1
    for name, tensor in inputs.items():
        wanted = expected.get(name)
        if wanted is None or tensor.datatype != wanted.datatype:
            return -1
        shape = tensor.array.shape
        if not signature.batched:
            if shape != wanted.dims:
                return -1
            continue
        if shape[1:] != wanted.dims or not shape:
            return -1
        if size < 0:
            size = shape[0]
        elif shape[0] != size:
            return -1
    if not signature.batched:
        return 0
    return size if 0 < size <= signature.max_batch_size else -1


def _checked_size(request: InferRequest, signature: ModelSignature) -> int:
    for name in request.outputs:
        if name not in signature.outputs:
            raise InvalidRequestError(f"unexpected inference output '{name}' for model '{signature.model}'")
    prefix = request_prefix(request)
    _check_names(request.inputs, signature, prefix)
    size = _batch_size(request.inputs, signature, prefix) if signature.batched else 0
    for name, tensor in request.inputs.items():
        _check_tensor(tensor, signature.inputs[name], signature, prefix)
    return size


def _check_names(inputs: dict[str, Tensor], signature: ModelSignature, prefix: str) -> None:
    most, least, got = len(signature.inputs), len(signature.required), len(inputs)
    missing = [name for name in signature.required if name not in inputs]
    unknown = [name for name in inputs if name not in signature.inputs]
    if least <= got <= most and unknown:
        raise InvalidRequestError(f"unexpected inference input '{unknown[0]}' for model '{signature.model}'")
    # Triton only counts, so that an optional input can stand in for a required one; models are not made for that.
    if missing or got > most:
        expected = f"{most} inputs" if most == least else f"number of inputs between {least} and {most}"
        raise InvalidRequestError(
            f"{prefix}expected {expected} but got {got} inputs for model '{signature.model}'. Got input(s) "
            f"{_quoted(inputs)}, but missing required input(s) {_quoted(missing)}. Please provide all required "
            "input(s)."
        )


def _batch_size(inputs: dict[str, Tensor], signature: ModelSignature, prefix: str) -> int:
    size: int | None = None
    for name, tensor in inputs.items():
        shape = tensor.array.shape
        if not shape:
            raise InvalidRequestError(
                f"{prefix}input '{name}' has no shape but model requires batch dimension for '{signature.model}'"
            )
        if size is None:
            size = shape[0]
        elif shape[0] != size:
            raise InvalidRequestError(
                f"{prefix}input '{name}' batch size does not match other inputs for '{signature.model}'"
            )
    if size is None:
        return 1
    if not size:
        first = next(iter(inputs))
        raise InvalidRequestError(
            f"{prefix}input byte size mismatch for input '{first}' for model '{signature.model}'. Expected "
            f"{signature.inputs[first].least_bytes}, got 0"
        )
    if size > signature.max_batch_size:
        raise InvalidRequestError(
            f"{prefix}inference request batch-size must be <= {signature.max_batch_size} for '{signature.model}'"
        )
    return size


def _check_tensor(tensor: Tensor, wanted: TensorSignature, signature: ModelSignature, prefix: str) -> None:
    if tensor.datatype != wanted.datatype:
        raise InvalidRequestError(
            f"{prefix}inference input '{wanted.name}' data-type is '{tensor.datatype}', but model "
            f"'{signature.model}' expects '{wanted.datatype}'"
        )
    shape = tensor.array.shape
    dims = (-1, *wanted.dims) if signature.batched else wanted.dims
    if len(shape) != len(dims) or any(dim not in (-1, size) for size, dim in zip(shape, dims, strict=True)):
        raise InvalidRequestError(
            f"{prefix}unexpected shape for input '{wanted.name}' for model '{signature.model}'. Expected "
            f"{_dims(dims)}, got {_dims(shape)}. {_BATCH_NOTE if signature.batched else ''}"
        )


def _quoted(names: Iterable[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"


def _dims(dims: Iterable[int]) -> str:
    return "[" + ",".join(map(str, dims)) + "]"
