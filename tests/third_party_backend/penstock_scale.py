"""A backend for penstock: the output is the input times the number in `factor.txt`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from penstock.classic.base import Backend, BackendInstance, BackendModel, Batch, InstanceContext, ModelContext
from penstock.classic.model_config import ModelConfig, datatype_value


class ScaleBackend(Backend):
    """`backend: "scale"`. `--backend-config=scale,offset=<n>` adds that to every output."""

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        if not config.input:
            config.input.add(name="INPUT", data_type=datatype_value("FP32"), dims=[-1])
        if not config.output:
            config.output.add(name="OUTPUT", data_type=datatype_value("FP32"), dims=[-1])

    def load_model(self, context: ModelContext) -> ScaleModel:
        text = (context.version_folder / "factor.txt").read_text()
        offset = self.options.get("offset", "0")
        return ScaleModel(context.config, np.float32(text), np.float32(offset))


class ScaleModel(BackendModel):
    def __init__(self, config: ModelConfig, factor: np.float32, offset: np.float32) -> None:
        if len(config.input) != 1 or len(config.output) != 1:
            raise ValueError(f"model '{config.name}' must have one input and one output")
        self.input, self.output = config.input[0].name, config.output[0].name
        self.factor, self.offset = factor, offset

    def load_instance(self, context: InstanceContext) -> ScaleInstance:
        return ScaleInstance(self)


class ScaleInstance(BackendInstance):
    def __init__(self, model: ScaleModel) -> None:
        self.model = model

    def execute(self, batch: Batch) -> None:
        model = self.model
        array = batch.gather()[model.input]
        batch.scatter({model.output: array * model.factor + model.offset})
