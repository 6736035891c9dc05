"""Descriptions of the server and its models: health, metadata, configuration and statistics, and their paths under /v2.

For HTTP and gRPC: the keys are the protobuf field names, so that the same dictionary fills the message.
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_statistics.md
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from penstock.classic.base import InferModel, reports_ready
from penstock.classic.model_config import ModelConfig, ModelInput, ModelOutput, config_json, datatype_name
from penstock.classic.statistics import BatchStatistics, Duration, ResponseStatistics
from penstock.engines.errors import InvalidRequestError, ModelNotFoundError, NotReadyError, PenstockError
from penstock.gateway.apis.kserve.context import KServe
from penstock.gateway.apis.kserve.store import ModelStore, ServedByModels
from penstock.gateway.requests.context import Principal
from penstock.gateway.transports.http.exchange import Exchange

_NOT_READY = msgspec.json.encode({"error": "Model version not ready"})


async def live(context: KServe, exchange: Exchange) -> None:
    """200, or 503 when only a new process can help; Triton's has one answer."""
    good = context.health.live()
    await _tell(exchange, 200 if good else 503, {"live": good})


async def ready(context: KServe, exchange: Exchange) -> None:
    """200 or, as Triton says no, 400."""
    good = context.health.ready() and not exchange.drain.leaving
    await _tell(exchange, 200 if good else 400, {"ready": good})


async def _tell(exchange: Exchange, status: int, shown: dict[str, object]) -> None:
    """KServe's client reads the body that the open inference protocol has. Triton's answer has none, and its scripts
    compare all that `curl` prints with the status: libraries say which encodings they read, curl does not."""
    if b"accept-encoding" in exchange.headers:
        await exchange.respond(status, msgspec.json.encode(shown))
    else:
        await exchange.respond(status, b"", content_type=b"text/plain")


async def server(context: KServe, exchange: Exchange) -> None:
    await exchange.respond(200, msgspec.json.encode(server_metadata(context)))


async def model_ready(context: KServe, exchange: Exchange, name: str, version: str) -> None:
    """Not ready is 400, for models that do not exist too. One that the next request would load is ready."""
    try:
        good = reports_ready(context.models.model(name, version))
    except PenstockError:
        good = context.plane.would_load(name)
    if good:
        await _tell(exchange, 200, {"name": name, "ready": True})
    else:
        await exchange.respond(400, _NOT_READY)


async def metadata(context: KServe, exchange: Exchange, name: str, version: str) -> None:
    model = await _described(context, exchange, name, version)
    versions = [model.version] if version else context.models.versions(name)
    await exchange.respond(200, msgspec.json.encode(model_metadata(model, versions)))


async def config(context: KServe, exchange: Exchange, name: str, version: str) -> None:
    model = await _described(context, exchange, name, version)
    await exchange.respond(200, config_json(model.config).encode())


async def _described(context: KServe, exchange: Exchange, name: str, version: str) -> InferModel:
    if context.names.loads:
        exchange.read_deadline()  # of the load
    return await context.plane.describe(name, version, exchange.context)


async def model_statistics(context: KServe, exchange: Exchange, name: str = "", version: str = "") -> None:
    await exchange.respond(
        200, msgspec.json.encode(statistics(context.models, exchange.context.principal, name, version))
    )


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
        {"name": tensor.name, "datatype": datatype_name(tensor.data_type), "shape": _shape(config, tensor)}
        for tensor in tensors
    ]


def _shape(config: ModelConfig, tensor: ModelInput | ModelOutput) -> list[int]:
    batch = [_VARIABLE] if config.max_batch_size > 0 and not tensor.is_shape_tensor else []
    return batch + list(tensor.dims)


Counters = dict[str, Any]


def statistics(models: ModelStore, caller: Principal, name: str = "", version: str = "") -> dict[str, list[Counters]]:
    """`{"model_stats": [...]}` of all models that the caller may use, of one in all its ready versions, or of one
    version.

    Raises InvalidRequestError for a model that is not there or not ready: Triton's 400, where everything else says 404
    or 503; PermissionDeniedError.
    """
    if name:
        caller.require_model(name)
    chosen = [model for model in _chosen(models, name, version) if name or caller.may_use(model.name)]
    return {"model_stats": [counters(model) for model in chosen]}


def _chosen(models: ModelStore, name: str, version: str) -> Iterable[InferModel]:
    if not name:
        return models.models()
    try:
        if version:
            return [models.model(name, version)]
        model = models.model(name)
        if isinstance(model, ServedByModels):
            return model.serving_models()
        return [models.model(name, str(one)) for one in models.versions(name)] or [model]
    except (ModelNotFoundError, NotReadyError):
        if models.versions(name):
            raise InvalidRequestError(f"requested model version is not available for model '{name}'") from None
        raise InvalidRequestError(f"requested model '{name}' is not available") from None


def counters(model: InferModel) -> Counters:
    """One entry of `model_stats`."""
    statistics = model.statistics
    return {
        "name": model.name,
        "version": str(model.version),
        "last_inference": statistics.last_inference_ms,
        "inference_count": statistics.inference_count,
        "execution_count": statistics.execution_count,
        "inference_stats": {
            "success": _duration(statistics.success),
            "fail": _duration(statistics.fail),
            "queue": _duration(statistics.queue),
            "compute_input": _duration(statistics.compute_input),
            "compute_infer": _duration(statistics.compute_infer),
            "compute_output": _duration(statistics.compute_output),
            "cache_hit": _duration(statistics.cache_hit),
            "cache_miss": _duration(statistics.cache_miss),
        },
        "response_stats": {str(index): _response(counts) for index, counts in sorted(statistics.responses.items())},
        "batch_stats": [_batch(size, counts) for size, counts in sorted(statistics.batches.items())],
        "memory_usage": [],
    }


def _duration(duration: Duration) -> Counters:
    return {"count": duration.count, "ns": duration.ns}


def _batch(size: int, batch: BatchStatistics) -> Counters:
    return {
        "batch_size": size,
        "compute_input": _duration(batch.compute_input),
        "compute_infer": _duration(batch.compute_infer),
        "compute_output": _duration(batch.compute_output),
    }


def _response(response: ResponseStatistics) -> Counters:
    return {
        "compute_infer": _duration(response.compute_infer),
        "compute_output": _duration(response.compute_output),
        "success": _duration(response.success),
        "fail": _duration(response.fail),
        "empty_response": _duration(response.empty_response),
        "cancel": _duration(response.cancel),
    }
