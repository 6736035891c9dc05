"""Ensembles of models that are functions, without a server around them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import cast

import numpy as np

from penstock.classic.base import Batch, Host, InferModel, ModelContext
from penstock.classic.ensemble.model import EnsembleModel
from penstock.classic.messages import InferResponse
from penstock.classic.tensors import Tensor
from penstock.engines.errors import ModelNotFoundError
from support.classic import Execute, model_config, served

X_TO_Y = """
    input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }
    output { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"


class Shelf:
    """A Host with the models of a test."""

    def __init__(self) -> None:
        self.models: dict[str, InferModel] = {}

    def model(self, name: str, version: int = -1) -> InferModel:
        if name not in self.models or version not in (-1, 1):
            raise ModelNotFoundError(f"Request for unknown model: '{name}' is not found")
        return self.models[name]

    def model_ready(self, name: str, version: int = -1) -> bool:
        return name in self.models and self.models[name].ready


def add(number: int) -> Execute:
    def execute(batch: Batch) -> None:
        batch.scatter({"Y": batch.gather()["X"] + np.int32(number)})

    return execute


def count_up(batch: Batch) -> None:
    """Answers with 0, 1, ... below X; of a request for 13 the fourth response is an error."""
    for call in batch.calls:
        wanted = int(call.request.inputs["X"].array.ravel()[0])
        for number in range(wanted):
            if wanted == 13 and number == 3:
                raise ValueError("thirteen")
            call.send(InferResponse([_int32(call.request.inputs["X"].array.shape, number)], final=False))
        call.send(InferResponse(None))


def _int32(shape: tuple[int, ...], value: int) -> Tensor:
    return Tensor("Y", "INT32", np.full(shape, value, np.int32))


def config_of(name: str, *text: str, max_batch_size: int = 8) -> str:
    return f'name: "{name}" backend: "test" max_batch_size: {max_batch_size}' + "\n".join(text)


def step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> str:
    """`inputs` and `outputs` from the model's names to those of the ensemble."""
    maps = [f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items()]
    maps += [f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items()]
    return f'step {{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}'


def x_to_y(model: str, source: str, target: str) -> str:
    return step(model, {"X": source}, {"Y": target})


def ensemble_of(shelf: Shelf, *steps: str, tensors: str = X_TO_Y, name: str = "e", more: str = "") -> EnsembleModel:
    """It is put on the shelf."""
    text = f'name: "{name}" platform: "ensemble" {tensors} ensemble_scheduling {{ {" ".join(steps)} }} {more}'
    context = ModelContext(
        name=name,
        version=1,
        config=model_config(text if "max_batch_size" in more else f"{text} max_batch_size: 8"),
        model_folder=Path("."),
        version_folder=Path("1"),
        host=cast(Host, shelf),
    )
    shelf.models[name] = model = EnsembleModel(context, shelf.model)
    return model


@asynccontextmanager
async def shelf_with(**models: Execute | tuple[Execute, str]) -> AsyncIterator[Shelf]:
    """Models with one input X and one output Y; a whole configuration may stand beside the function."""
    shelf = Shelf()
    async with AsyncExitStack() as stack:
        for name, made in models.items():
            execute, text = made if isinstance(made, tuple) else (made, config_of(name, X_TO_Y))
            shelf.models[name] = await stack.enter_async_context(served(model_config(text), execute))
        yield shelf
