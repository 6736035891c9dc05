"""Triton's `pytorch` backend: model.pt (TorchScript), model.pt2 (torch.export, AOTInductor), model.py (runtime).

docs/builtin_backends.md lists what it supports.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.classic.base import Backend, BackendInstance, BackendModel, Batch, InstanceContext, ModelContext
from penstock.classic.batching.ragged import generated_inputs
from penstock.classic.batching.sequences.controls import server_inputs, state_outputs
from penstock.classic.frameworks import (
    DescribedModel,
    Scalars,
    check,
    complete,
    default_max_batch_size,
    is_complete,
    scalars_of,
)
from penstock.classic.model_config import ModelConfig, datatype_name, datatype_value
from penstock.classic.parameters import check_options
from penstock.classic.python.backend import PythonBackend
from penstock.classic.pytorch.options import PyTorchOptions, check_installed, explain, load_torch, options
from penstock.classic.pytorch.programs import (
    DICTIONARY,
    STRINGS,
    Format,
    InputBinding,
    Program,
    bind_inputs,
    bind_outputs,
    from_strings,
    from_torch,
    load_program,
    model_file,
    results,
    to_strings,
    to_torch,
)
from penstock.classic.tensors import Array
from penstock.engines.errors import EngineError, InvalidRequestError, NoResourcesError, PenstockError

logger = logging.getLogger(__name__)

_RUNTIME = "model.py"


class ModuleBackend(PythonBackend):
    """`runtime: "model.py"`: a torch.nn.Module in Python, in a process of its own."""

    program = Path(__file__).parent / "program" / "module_program.py"


class PyTorchBackend(Backend):
    """Option: `default-max-batch-size`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """Raises ValueError for an unknown option."""
        super().__init__(options)
        check_options("pytorch", options)
        self._modules = ModuleBackend({})

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        check_installed()
        if _is_module(config):
            self._modules.auto_complete(config, version_folder)
            return
        path, format = model_file(config, version_folder)
        options(config)
        if is_complete(config):
            return
        if format is not Format.EXPORTED:
            raise ValueError(
                f"model '{config.name}' needs its inputs and outputs in config.pbtxt: '{path.name}' ({format.value})"
                " does not tell their shapes and types"
            )
        program = load_program(path, format, load_torch().device("cpu"))
        assert program.described is not None
        complete(config, program.described, min(default_max_batch_size(self.options), program.most_rows or 1 << 30))

    def load_model(self, context: ModelContext) -> BackendModel:
        if _is_module(context.config):
            return self._modules.load_model(context)
        path, format = model_file(context.config, context.version_folder)
        return PyTorchModel(path, format, context.config, options(context.config))


class PyTorchModel(BackendModel):
    def __init__(self, path: Path, format: Format, config: ModelConfig, options: PyTorchOptions) -> None:
        self._path = path
        self._format = format
        self._config = config
        self._options = options
        self._programs: dict[Any, Program] = {}
        """By device, where its instances share one."""
        self._loading = threading.Lock()

    def load_instance(self, context: InstanceContext) -> PyTorchInstance:
        device = load_torch().device("cpu" if context.kind != "GPU" else f"cuda:{context.device_id}")
        program = self._program(device)
        binding, scalars = _bound(program, self._config)
        return PyTorchInstance(program, binding, scalars, self._config, self._options, device)

    def _program(self, device: Any) -> Program:
        if not self._options.shared_weights:
            return load_program(self._path, self._format, device)
        with self._loading:
            if device not in self._programs:
                self._programs[device] = load_program(self._path, self._format, device)
            return self._programs[device]

    def unload(self) -> None:
        self._programs.clear()


def _is_module(config: ModelConfig) -> bool:
    """Raises ValueError for another runtime, and for what this one does not support."""
    if config.runtime not in ("", _RUNTIME):
        raise ValueError(f"model '{config.name}': the pytorch backend has no runtime '{config.runtime[:64]}'")
    if not config.runtime:
        return False
    unsupported = {
        "ragged inputs": config.batch_input or any(tensor.allow_ragged_batch for tensor in config.input),
        "optional inputs": any(tensor.optional for tensor in config.input),
        "strings": any(tensor.data_type == datatype_value("BYTES") for tensor in (*config.input, *config.output)),
    }
    for what, is_there in unsupported.items():
        if is_there:
            raise ValueError(f"model '{config.name}': {what} are not supported with runtime '{_RUNTIME}'")
    return True


def _bound(program: Program, config: ModelConfig) -> tuple[InputBinding, list[str]]:
    """With it the inputs that are scalars, where the program tells. Raises ValueError when the configuration is not
    one of this program."""
    inputs = [*config.input, *server_inputs(config), *generated_inputs(config)]
    optional = [tensor.name for tensor in config.input if tensor.optional]
    try:
        binding = bind_inputs([tensor.name for tensor in inputs], optional, program.arguments)
    except ValueError as error:
        raise ValueError(f"unable to load model '{config.name}', {error}") from None
    _check_strings(config, binding)
    if program.most_rows is not None and config.max_batch_size > program.most_rows:
        raise ValueError(
            f"unable to load model '{config.name}', max_batch_size {config.max_batch_size} is above the"
            f" {program.most_rows} that it was exported for"
        )
    if program.described is None:
        return binding, []
    described = _renamed(program.described, binding, config)
    check(config, described)
    return binding, scalars_of(described.inputs)


def _check_strings(config: ModelConfig, binding: InputBinding) -> None:
    types = {name: argument.type for name, argument in zip(binding.order, binding.arguments, strict=False)}
    for tensor in config.input:
        is_text = datatype_name(tensor.data_type) == "BYTES"
        expected = types.get(tensor.name, DICTIONARY)
        if is_text != (expected == STRINGS):
            raise ValueError(
                f"unable to load model '{config.name}', input '{tensor.name}' is a"
                f" {datatype_name(tensor.data_type)}, and its argument takes a {expected}"
            )


def _renamed(described: DescribedModel, binding: InputBinding, config: ModelConfig) -> DescribedModel:
    """With the names of the configuration."""
    inputs = [
        replace(tensor, name=name or tensor.name) for name, tensor in zip(binding.order, described.inputs, strict=True)
    ]
    outputs = list(described.outputs)
    if all(tensor.name == f"OUTPUT__{index}" for index, tensor in enumerate(outputs)):  # a tuple: no names of its own
        for name, index in bind_outputs([tensor.name for tensor in (*config.output, *state_outputs(config))]).items():
            if index < len(outputs):
                outputs[index] = replace(outputs[index], name=name)
    return DescribedModel(tuple(inputs), tuple(outputs))


class PyTorchInstance(BackendInstance):
    def __init__(
        self,
        program: Program,
        binding: InputBinding,
        scalars: Iterable[str],
        config: ModelConfig,
        options: PyTorchOptions,
        device: Any,
    ) -> None:
        """`scalars`: inputs that the program takes without dimensions."""
        self._torch = load_torch()
        self._program = program
        self._binding = binding
        self._options = options
        self._device = device
        outputs = [*config.output, *state_outputs(config)]
        self._places = bind_outputs([tensor.name for tensor in outputs])
        self._scalars = Scalars(scalars, (), ())
        self._dims = {
            tensor.name: tuple(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)
            for tensor in config.output
        }
        self._texts = {tensor.name for tensor in config.output if datatype_name(tensor.data_type) == "BYTES"}
        self._batched = config.max_batch_size > 0
        self._thread_is_set = False

    def execute(self, batch: Batch) -> None:
        if not self._thread_is_set:
            self._set_thread()
        inputs = batch.gather()
        self._scalars.for_model(inputs)
        shared = len(batch.calls) == 1
        try:
            with self._torch.inference_mode(self._options.inference_mode), self._torch.no_grad():
                feed = {name: self._to_torch(name, array, shared) for name, array in inputs.items()}
                values = self._program.run(self._binding.values(feed))
                outputs = {name: self._from_torch(name, value) for name, value in results(values, self._places).items()}
        except PenstockError:
            raise
        except Exception as error:
            raise self._explained(error) from error
        finally:
            if self._options.clean_cache and self._device.type == "cuda":
                self._torch.cuda.empty_cache()
        batch.scatter(outputs)

    def _set_thread(self) -> None:
        """PyTorch keeps both for each thread, and this one is the instance's own."""
        self._torch.set_num_threads(self._options.threads)
        if not self._options.optimized:
            self._torch._C._set_graph_executor_optimize(False)
        self._thread_is_set = True

    def _to_torch(self, name: str, array: Array, shared: bool) -> Any:
        if array.dtype.hasobject:
            return to_strings(name, array)
        return to_torch(array, self._device, shared=shared)

    def _from_torch(self, name: str, value: Any) -> Array:
        dims = self._dims.get(name, ())
        if name in self._texts:
            return from_strings(name, value, dims, self._batched)
        array = from_torch(name, value)
        if not array.ndim and not self._batched and all(dim in (1, -1) for dim in dims):
            return array.reshape((1,) * len(dims))
        return array

    def _explained(self, error: Exception) -> PenstockError:
        text = f"PyTorch execute failure: {explain(error)}"
        if isinstance(error, MemoryError | self._torch.OutOfMemoryError) or "can't allocate memory" in text:
            return NoResourcesError(text)
        # an operator that fails on a CPU fails for the data it was given; on a GPU, that may be anything
        if self._device.type == "cpu" and isinstance(error, RuntimeError | IndexError | ValueError | AssertionError):
            return InvalidRequestError(text)
        logger.error("%s", text)
        return EngineError(text)

    def unload(self) -> None:
        # its memory is the model's weights
        del self._program
