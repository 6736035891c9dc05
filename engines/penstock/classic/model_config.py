"""Triton's ModelConfig message, the one schema of a classic model's configuration, and its JSON form.

The message is that of tritonclient's generated stubs of `model_config.proto`.
"""

from __future__ import annotations

import json
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from tritonclient.grpc.model_config_pb2 import (
    BatchInput,
    BatchOutput,
    DataType,
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
    ModelQueuePolicy,
    ModelSequenceBatching,
)

from penstock.classic.tensors import config_type, from_config_type

__all__ = [
    "BatchInput",
    "BatchOutput",
    "DataType",
    "ModelConfig",
    "ModelDynamicBatching",
    "ModelInput",
    "ModelInstanceGroup",
    "ModelOutput",
    "ModelQueuePolicy",
    "ModelSequenceBatching",
    "config_dict",
    "config_json",
    "datatype_name",
    "datatype_value",
]

_INT64 = {FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64}


def datatype_name(data_type: int) -> str:
    """`FP32` for the enum value TYPE_FP32."""
    return from_config_type(DataType.Name(data_type))


def datatype_value(datatype: str) -> int:
    """The enum value for `FP32`. Raises ValueError."""
    return int(DataType.Value(config_type(datatype)))


def config_dict(config: ModelConfig) -> dict[str, Any]:
    """The configuration as Triton writes it in JSON: proto field names, defaults shown, 64-bit integers as numbers."""
    settings: dict[str, Any] = json_format.MessageToDict(
        config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _numbers(config, settings)
    return settings


def config_json(config: ModelConfig) -> str:
    return json.dumps(config_dict(config))


def _numbers(message: Message, settings: dict[str, Any]) -> None:
    """Protobuf's JSON writes 64-bit integers as strings; Triton's clients expect numbers."""
    for field in message.DESCRIPTOR.fields:
        value = settings.get(field.name)
        if value is None:
            continue
        if field.message_type is None:
            if field.cpp_type in _INT64:
                settings[field.name] = [int(item) for item in value] if isinstance(value, list) else int(value)
        elif field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is not None:
                for key, item in getattr(message, field.name).items():
                    _numbers(item, value[str(key)])
        elif isinstance(value, list):
            for item, inner in zip(getattr(message, field.name), value, strict=True):
                _numbers(item, inner)
        else:
            _numbers(getattr(message, field.name), value)
