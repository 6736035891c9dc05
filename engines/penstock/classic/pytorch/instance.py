"""One instance: a program that runs one batch at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from penstock.classic.base import BackendInstance, Batch
from penstock.classic.batching.sequences.controls import state_outputs
from penstock.classic.described import Scalars
from penstock.classic.model_config import ModelConfig, datatype_name
from penstock.classic.pytorch import values
from penstock.classic.pytorch.binding import InputBinding, bind_outputs, results
from penstock.classic.pytorch.library import explain, load_torch
from penstock.classic.pytorch.options import Options
from penstock.classic.pytorch.programs import Program
from penstock.classic.tensors import Array
from penstock.engines.errors import EngineError, InvalidRequestError, NoResourcesError, PenstockError

logger = logging.getLogger(__name__)


class PyTorchInstance(BackendInstance):
    def __init__(
        self,
        program: Program,
        binding: InputBinding,
        scalars: Iterable[str],
        config: ModelConfig,
        options: Options,
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
                found = self._program.run(self._binding.values(feed))
                outputs = {name: self._from_torch(name, value) for name, value in results(found, self._places).items()}
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
            return values.to_strings(name, array)
        return values.to_torch(array, self._device, shared=shared)

    def _from_torch(self, name: str, found: Any) -> Array:
        dims = self._dims.get(name, ())
        if name in self._texts:
            return values.from_strings(name, found, dims, self._batched)
        array = values.from_torch(name, found)
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
