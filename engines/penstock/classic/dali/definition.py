"""What a serialized pipeline says of its inputs and outputs. DALI's Python module does not tell."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

_EXTERNAL_SOURCES = frozenset({"ExternalSource", "_ExternalSource", "external_source"})
_INPUT_OPERATORS = ("inputs__", "experimental__inputs__")
"""Those that requests feed, too, and that give many batches for one."""
_DATATYPES = (
    *("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BOOL"),
)
"""In the order of DALI's enum."""

_FIELD = descriptor_pb2.FieldDescriptorProto
_FIELDS: dict[str, list[tuple[str, int, Any, bool]]] = {
    "Argument": [("name", 1, _FIELD.TYPE_STRING, False), ("integer", 4, _FIELD.TYPE_INT64, False)],
    "Tensor": [
        ("name", 1, _FIELD.TYPE_STRING, False),
        ("datatype", 5, _FIELD.TYPE_INT32, False),
        ("dimensions", 6, _FIELD.TYPE_INT32, False),
    ],
    "Operator": [
        ("name", 1, _FIELD.TYPE_STRING, False),
        ("outputs", 3, "Tensor", True),
        ("arguments", 4, "Argument", True),
    ],
    "Pipeline": [
        ("batch_size", 2, _FIELD.TYPE_INT32, False),
        ("operators", 5, "Operator", True),
        ("outputs", 7, "Tensor", True),
    ],
}
"""The part of DALI's messages that is read here: names of our own, with DALI's numbers."""


@dataclass(frozen=True, slots=True)
class PipelineTensor:
    name: str
    datatype: str
    """Empty: the pipeline does not say."""
    rank: int | None
    """Without the batch dimension."""


@dataclass(frozen=True, slots=True)
class Definition:
    batch_size: int
    inputs: tuple[PipelineTensor, ...]
    outputs: tuple[PipelineTensor, ...]


def read_definition(serialized: bytes) -> Definition:
    """Raises ValueError when this is no pipeline, or one with inputs that cannot be fed here."""
    pipeline = _message_class()()
    try:
        pipeline.ParseFromString(serialized)
    except DecodeError as error:
        raise ValueError("the file is no serialized DALI pipeline") from error
    if not pipeline.operators or not pipeline.outputs:
        raise ValueError("the file is no serialized DALI pipeline")
    for operator in pipeline.operators:
        if operator.name.startswith(_INPUT_OPERATORS):
            raise ValueError(f"the pipeline's {operator.name} is not supported: inputs must be external_source")
    inputs = [_input(operator) for operator in pipeline.operators if operator.name in _EXTERNAL_SOURCES]
    outputs = [_tensor(found.name, found.datatype, found.dimensions) for found in pipeline.outputs]
    return Definition(pipeline.batch_size, tuple(inputs), tuple(outputs))


def _input(operator: Any) -> PipelineTensor:
    arguments = {argument.name: argument.integer for argument in operator.arguments}
    return _tensor(operator.outputs[0].name, arguments.get("dtype", -1), arguments.get("ndim", -1))


def _tensor(name: str, datatype: int, rank: int) -> PipelineTensor:
    known = 0 <= datatype < len(_DATATYPES)
    return PipelineTensor(name, _DATATYPES[datatype] if known else "", rank if rank >= 0 else None)


@cache
def _message_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="penstock/dali.proto", package="penstock.dali", syntax="proto2")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            made = message.field.add(name=field, number=number, label=label)
            if isinstance(kind, str):
                made.type, made.type_name = _FIELD.TYPE_MESSAGE, f".penstock.dali.{kind}"
            else:
                made.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("penstock.dali.Pipeline"))
