"""Which layers of a model an adapter may change, and whether an adapter fits them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from penstock.engines.errors import InvalidRequestError
from penstock.engines.formats.adapter_files import LowRank


class LinearLayer(Protocol):
    @property
    def inputs(self) -> int: ...
    @property
    def outputs(self) -> int: ...


T = TypeVar("T", bound=LinearLayer)


def targets_of(layers: Mapping[str, LowRank], targets: Mapping[str, T]) -> dict[str, T]:
    """What each of an adapter's `layers` changes, by path. Raises InvalidRequestError for a layer that the model lacks
    or has with other sizes."""
    return {path: _target(path, layer, targets.get(path)) for path, layer in layers.items()}


def _target(path: str, layer: LowRank, target: T | None) -> T:
    if target is None:
        raise InvalidRequestError(f"the model has no linear layer {path[:200]} that an adapter could change")
    if (layer.a.shape[1], layer.b.shape[0]) != (target.inputs, target.outputs):
        raise InvalidRequestError(
            f"the adapter's {path} has {layer.a.shape[1]} inputs and {layer.b.shape[0]} outputs, the model's has "
            f"{target.inputs} and {target.outputs}"
        )
    return target
