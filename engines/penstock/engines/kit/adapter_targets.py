"""Which layers of a model an adapter may change, and whether an adapter fits them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from penstock.engines.errors import InvalidRequestError
from penstock.engines.formats.adapter_files import LowRank
from penstock.engines.formats.model_settings import text_name


class LinearLayer(Protocol):
    @property
    def inputs(self) -> int: ...
    @property
    def outputs(self) -> int: ...


def fitting_layers(layers: Mapping[str, LowRank], targets: Mapping[str, LinearLayer]) -> dict[str, LowRank]:
    """An adapter's `layers` by the paths of the model's. An adapter of a model that also takes images names the layers
    of the language model otherwise, and may change others, which no text goes through: these are left out.

    Raises InvalidRequestError for a layer that the model lacks or has with other sizes.
    """
    fitting: dict[str, LowRank] = {}
    for path, layer in layers.items():
        name = path if path in targets else text_name(path)
        if name is None:
            continue
        name = f"model.{name}" if name.startswith("layers.") and name not in targets else name
        if name in fitting:
            raise InvalidRequestError(f"the adapter has {name[:200]} twice, by different names")
        _check(path, layer, targets.get(name))
        fitting[name] = layer
    if not fitting:
        raise InvalidRequestError("the adapter changes no layer of the language model")
    return fitting


def _check(path: str, layer: LowRank, target: LinearLayer | None) -> None:
    if target is None:
        raise InvalidRequestError(f"the model has no linear layer {path[:200]} that an adapter could change")
    if (layer.a.shape[1], layer.b.shape[0]) != (target.inputs, target.outputs):
        raise InvalidRequestError(
            f"the adapter's {path} has {layer.a.shape[1]} inputs and {layer.b.shape[0]} outputs, the model's has "
            f"{target.inputs} and {target.outputs}"
        )
