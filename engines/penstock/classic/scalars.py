"""Tensors that a model has as scalars, and its configuration as [1]."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from penstock.classic.model_config import ModelOutput
from penstock.classic.tensors import Array


class Scalars:
    def __init__(self, inputs: Iterable[str], outputs: Collection[str], configured: Iterable[ModelOutput]) -> None:
        """`inputs` and `outputs` name the model's scalars. `configured` are all outputs of the configuration."""
        self._inputs = tuple(inputs)
        self.outputs = {tensor.name: tuple(tensor.dims) for tensor in configured if tensor.name in outputs}
        """With the shapes that the configuration gives them."""

    def for_model(self, feed: dict[str, Array]) -> None:
        """Gives inputs of one element the model's shape."""
        for name in self._inputs:
            if name in feed and feed[name].size == 1:
                feed[name] = feed[name].reshape(())

    def as_configured(self, outputs: dict[str, Array]) -> None:
        for name, dims in self.outputs.items():
            if name in outputs and outputs[name].size == 1:
                outputs[name] = outputs[name].reshape(dims)
