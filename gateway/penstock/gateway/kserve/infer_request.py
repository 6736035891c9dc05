"""An inference request as HTTP carries it: a JSON header, and behind it binary tensors.

Protocol: https://github.com/kserve/open-inference-protocol and Triton's extensions for binary data, classification and
shared memory. Every size is checked against what is really there before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import UNSET, Raw, Struct, UnsetType

from penstock.classic.base import InferModel
from penstock.classic.messages import InferRequest
from penstock.classic.tensors import NUMPY_TYPES, Tensor, element_count
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.front.bounded_json import decode_json
from penstock.gateway.kserve.infer_json import from_json
from penstock.gateway.kserve.infer_raw import binary_tensor, raw_input
from penstock.gateway.kserve.parameters import MAX_MEMBERS, boolean, take_parameters
from penstock.gateway.kserve.parameters import from_json as parameter_from_json
from penstock.gateway.kserve.shared_memory import SharedMemoryRegions, SharedMemorySlice
from penstock.gateway.kserve.tensor_plane import OutputForm

_MAX_CLASSES = 2**31


class _Region(Struct):
    """The parameters with which a tensor lies in shared memory."""

    shared_memory_region: str | UnsetType = UNSET
    shared_memory_offset: int = 0
    shared_memory_byte_size: int | UnsetType = UNSET


class _InputParameters(_Region):
    binary_data_size: int | UnsetType = UNSET


class _OutputParameters(_Region):
    binary_data: bool | UnsetType = UNSET
    classification: int = 0


class _Input(Struct):
    name: str
    shape: tuple[int, ...]
    datatype: str
    data: Raw | UnsetType = UNSET
    parameters: _InputParameters | None = None


class _Output(Struct):
    name: str
    parameters: _OutputParameters | None = None


class _Body(Struct):
    """Clients that write every field of a schema write null for those that they do not use."""

    inputs: list[_Input]
    id: str | None = None
    parameters: dict[str, Raw] | None = None
    outputs: list[_Output] | None = None


@dataclass(slots=True)
class HttpForm(OutputForm):
    """A JSON array, or with `binary` the elements behind the JSON."""

    binary: bool = False


@dataclass(slots=True)
class Inference:
    """A request as it came over HTTP: what the model is asked, and how the answer is to be written."""

    request: InferRequest
    forms: dict[str, HttpForm] = field(default_factory=dict)
    """Of the outputs that were asked for by name."""
    binary: bool = False
    """The form of all others."""


def parse_infer(body: bytes, header_length: int | None, model: InferModel, regions: SharedMemoryRegions) -> Inference:
    """What stands in `body`. `header_length` is the length of its JSON part; None: all of it is JSON; 0: none of it is,
    it is the model's only input. Raises InvalidRequestError, NotFoundError and UnsupportedError."""
    if header_length == 0:
        return Inference(InferRequest(inputs=raw_input(body, model)), binary=True)
    size = len(body)
    if header_length is None or header_length == size:
        head, header_length = body, size
    elif header_length > size:
        raise InvalidRequestError(f"inference header size should be in range (0, {size}), got: {header_length}")
    else:
        head = body[:header_length]
    parsed = decode_json(head, _Body, most_members=MAX_MEMBERS)
    inputs = _Inputs(memoryview(body), header_length, model.name, regions)
    request = InferRequest(inputs=inputs.take_all(parsed.inputs), id=parsed.id or "")
    inference = Inference(request)
    if parsed.parameters is not None:
        parameters = {name: parameter_from_json(value) for name, value in parsed.parameters.items()}
        inference.binary = boolean("binary_data_output", parameters.get("binary_data_output", False))
        take_parameters(request, parameters)
    for output in parsed.outputs or ():
        if output.name in inference.forms:
            raise InvalidRequestError(f"output '{output.name[:128]}' is requested more than once")
        inference.forms[output.name] = _form(output, inference.binary, regions)
    request.outputs = tuple(inference.forms)
    return inference


class _Inputs:
    """Takes the inputs of one request from its body, the binary ones in turn."""

    def __init__(self, body: memoryview, position: int, model: str, regions: SharedMemoryRegions) -> None:
        self._body = body
        self._position = position
        self._model = model
        self._regions = regions

    def take_all(self, inputs: Sequence[_Input]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for given in inputs:
            if given.name in found:
                raise InvalidRequestError(f"input '{given.name[:128]}' already exists in request")
            found[given.name] = self._take(given)
        if self._position != len(self._body):
            raise InvalidRequestError(f"unexpected additional input data for model '{self._model}'")
        return found

    def _take(self, given: _Input) -> Tensor:
        parameters = given.parameters
        if parameters is None:
            if given.data is UNSET:
                raise _one_source()
            return from_json(given.name, given.datatype, given.shape, given.data)
        size, region = parameters.binary_data_size, parameters.shared_memory_region
        set_fields = [value for value in (given.data, size, region) if value is not UNSET]
        if len(set_fields) != 1:
            raise _one_source()
        if given.data is not UNSET:
            return from_json(given.name, given.datatype, given.shape, given.data)
        if size is not UNSET:
            data = self._binary(given.name, size)
        else:
            data = _input_memory(given, parameters, self._regions)
        return binary_tensor(given.name, given.datatype, given.shape, data)

    def _binary(self, name: str, size: int) -> memoryview:
        left = len(self._body) - self._position
        if size < 0:
            raise InvalidRequestError(f"'binary_data_size' of input '{name[:128]}' must not be negative")
        if size > left:
            raise InvalidRequestError(
                f"unexpected size for input '{name[:128]}', expecting {size - left} additional bytes for model "
                f"'{self._model}'"
            )
        start = self._position
        self._position += size
        return self._body[start : self._position]


def _input_memory(given: _Input, parameters: _InputParameters, regions: SharedMemoryRegions) -> memoryview:
    """Checked against the shape before it is read."""
    memory = _memory(given.name, parameters, regions)
    dtype = NUMPY_TYPES.get(given.datatype)
    count = element_count(given.shape, given.name)
    if dtype is not None and given.datatype != "BYTES" and count * dtype.itemsize != memory.byte_size:
        raise InvalidRequestError(
            f"unexpected total byte size {memory.byte_size} for input '{given.name[:128]}', expecting "
            f"{count * dtype.itemsize}"
        )
    return memory.read()


def _memory(name: str, parameters: _Region, regions: SharedMemoryRegions) -> SharedMemorySlice:
    region, size = parameters.shared_memory_region, parameters.shared_memory_byte_size
    if region is UNSET or size is UNSET:
        raise InvalidRequestError(
            f"'shared_memory_region' and 'shared_memory_byte_size' of '{name[:128]}' must be given together"
        )
    return regions.slice(region, parameters.shared_memory_offset, size)


def _form(output: _Output, binary: bool, regions: SharedMemoryRegions) -> HttpForm:
    parameters = output.parameters
    if parameters is None:
        return HttpForm(binary=binary)
    classes = parameters.classification
    if not 0 <= classes < _MAX_CLASSES:
        raise InvalidRequestError(f"'classification' of output '{output.name[:128]}' is out of range")
    if parameters.shared_memory_region is UNSET and parameters.shared_memory_byte_size is UNSET:
        return HttpForm(classes, binary=binary if parameters.binary_data is UNSET else parameters.binary_data)
    if classes or parameters.binary_data is True:
        other = "classification" if classes else "binary_data"
        raise InvalidRequestError(f"Output can't set both 'shared_memory_region' and '{other}'")
    return HttpForm(memory=_memory(output.name, parameters, regions))


def _one_source() -> InvalidRequestError:
    return InvalidRequestError(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
        "'shared_memory_region' in 'parameters'."
    )
