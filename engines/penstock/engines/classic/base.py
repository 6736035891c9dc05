"""`penstock.classic.base` under its earlier name."""

from penstock.classic.base import (
    AsyncInstance,
    Backend,
    BackendInstance,
    BackendModel,
    Batch,
    Host,
    InferCall,
    InferModel,
    InstanceContext,
    Metric,
    ModelContext,
    ResponseStream,
)

__all__ = [
    "AsyncInstance",
    "Backend",
    "BackendInstance",
    "BackendModel",
    "Batch",
    "Host",
    "InferCall",
    "InferModel",
    "InstanceContext",
    "Metric",
    "ModelContext",
    "ResponseStream",
]
