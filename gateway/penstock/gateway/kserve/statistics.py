"""Model statistics in Triton's words.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_statistics.md
The keys are the field names of `inference.ModelStatistics`, so that the same dictionary fills the protobuf message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.classic.base import InferModel
from penstock.classic.statistics import BatchStatistics, Duration, ResponseStatistics
from penstock.engines.errors import InvalidRequestError, ModelNotFoundError
from penstock.gateway.front.context import Principal
from penstock.gateway.kserve.store import ModelStore, ServedByOthers

Counters = dict[str, Any]


def statistics(models: ModelStore, caller: Principal, name: str = "", version: str = "") -> dict[str, list[Counters]]:
    """`{"model_stats": [...]}` of all models that the caller may use, of one in all its ready versions, or of one
    version.

    Raises InvalidRequestError for a model that is not there: Triton's 400, where everything else says 404;
    PermissionDeniedError.
    """
    if name:
        caller.require_model(name)
    chosen = [model for model in _chosen(models, name, version) if name or caller.may_use(model.name)]
    return {"model_stats": [model_statistics(model) for model in chosen]}


def _chosen(models: ModelStore, name: str, version: str) -> Iterable[InferModel]:
    if not name:
        return models.models()
    try:
        if version:
            return [models.model(name, version)]
        model = models.model(name)
        if isinstance(model, ServedByOthers):
            return model.others()
        return [models.model(name, str(each)) for each in models.versions(name)] or [model]
    except ModelNotFoundError:
        if models.versions(name):
            raise InvalidRequestError(f"requested model version is not available for model '{name}'") from None
        raise InvalidRequestError(f"requested model '{name}' is not available") from None


def model_statistics(model: InferModel) -> Counters:
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
        "response_stats": {str(index): _response(each) for index, each in sorted(statistics.responses.items())},
        "batch_stats": [_batch(size, each) for size, each in sorted(statistics.batches.items())],
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
