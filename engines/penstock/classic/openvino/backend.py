"""Triton's `openvino` backend. docs/backends.md says what of it there is."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.classic.base import Backend, BackendModel, InstanceContext, ModelContext
from penstock.classic.batching.ragged import generated_inputs
from penstock.classic.batching.sequences.controls import server_inputs, state_outputs
from penstock.classic.described import DescribedModel, check, complete, default_max_batch_size, is_complete
from penstock.classic.model_config import ModelConfig
from penstock.classic.model_files import model_path
from penstock.classic.openvino.description import describe, reshape
from penstock.classic.openvino.files import FILENAMES, read_model
from penstock.classic.openvino.instance import OpenVINOInstance
from penstock.classic.openvino.library import core, explain
from penstock.classic.openvino.options import Options, options
from penstock.classic.parameters import check_options


class OpenVINOBackend(Backend):
    """Options: `default-max-batch-size`; `cache-dir`, a folder for compiled models."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """Raises ValueError for an unknown option."""
        super().__init__(options)
        check_options("openvino", options, {"cache-dir"})

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        found = options(config, self.options)
        model_path(config, version_folder, *FILENAMES)
        if is_complete(config):
            return
        model = _prepared(config, version_folder, found)
        complete(config, describe(model, _names(config)), default_max_batch_size(self.options))

    def load_model(self, context: ModelContext) -> OpenVINOModel:
        found = options(context.config, self.options)
        return OpenVINOModel(_prepared(context.config, context.version_folder, found), context.config, found)


class OpenVINOModel(BackendModel):
    """The instances share the compiled model, and so the weights; it has a stream of threads for each of them."""

    def __init__(self, model: Any, config: ModelConfig, options: Options) -> None:
        self._config = config
        self._options = options
        self._described = _checked(model, config, options)
        try:
            self._compiled = core().compile_model(model, options.device, dict(options.properties))
        except Exception as error:
            raise ValueError(f"model '{config.name}' cannot be compiled: {explain(error)}") from error
        self._creating = threading.Lock()

    def load_instance(self, context: InstanceContext) -> OpenVINOInstance:
        context.require_cpu("the parameter TARGET_DEVICE names OpenVINO's devices")
        with self._creating:
            request = self._compiled.create_infer_request()
        return OpenVINOInstance(request, self._config, self._described, self._options)

    def unload(self) -> None:
        del self._compiled


def _prepared(config: ModelConfig, version_folder: Path, options: Options) -> Any:
    """The model with the shapes that the configuration asks for."""
    model = read_model(config, version_folder)
    reshape(model, config, static_batch=options.static_batch, to_config=options.reshapes)
    return model


def _names(config: ModelConfig) -> list[str]:
    inputs = (*config.input, *server_inputs(config), *generated_inputs(config))
    return [tensor.name for tensor in (*inputs, *config.output, *state_outputs(config))]


def _checked(model: Any, config: ModelConfig, options: Options) -> DescribedModel:
    """What the model tells. Raises ValueError when the configuration is not one of it."""
    described = describe(model, _names(config))
    check(config, _with_any_batch(described) if options.static_batch else described)
    return described


def _with_any_batch(described: DescribedModel) -> DescribedModel:
    """As if its batch size were variable: requests have any, up to the model's."""

    def opened(tensors: Any) -> Any:
        return tuple(replace(tensor, shape=(-1, *tensor.shape[1:])) for tensor in tensors)

    return DescribedModel(opened(described.inputs), opened(described.outputs))
