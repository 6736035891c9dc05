"""What the server and its models say about themselves, for HTTP and gRPC: the keys are the protobuf field names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.classic.base import InferModel
from penstock.classic.model_config import ModelConfig, ModelInput, ModelOutput, datatype_name
from penstock.gateway.kserve.context import KServe

_EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)
_VARIABLE = -1


def server_metadata(context: KServe) -> dict[str, Any]:
    """name, version and those of Triton's protocol extensions that this server has."""
    shared_memory = ("system_shared_memory",) if context.shared_memory.allowed else ()
    return {"name": context.name, "version": context.version, "extensions": [*_EXTENSIONS, *shared_memory]}


def would_load(context: KServe, name: str) -> bool:
    """Whether a request would load this model, which does not serve."""
    return context.on_demand is not None and context.on_demand.offers_now(name)


def model_metadata(model: InferModel, versions: Sequence[int]) -> dict[str, Any]:
    """name, versions, platform, inputs and outputs. A model that batches has one variable dimension in front."""
    config = model.config
    return {
        "name": model.name,
        "versions": [str(version) for version in versions],
        "platform": config.platform or config.backend,
        "inputs": _tensors(config, config.input),
        "outputs": _tensors(config, config.output),
    }


def _tensors(config: ModelConfig, tensors: Iterable[ModelInput | ModelOutput]) -> list[dict[str, Any]]:
    return [
        {"name": each.name, "datatype": datatype_name(each.data_type), "shape": _shape(config, each)}
        for each in tensors
    ]


def _shape(config: ModelConfig, tensor: ModelInput | ModelOutput) -> list[int]:
    batch = [_VARIABLE] if config.max_batch_size > 0 and not tensor.is_shape_tensor else []
    return batch + list(tensor.dims)
